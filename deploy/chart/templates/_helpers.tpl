{{- define "dovetail.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "dovetail.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "dovetail.labels" -}}
{{ include "dovetail.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "dovetail.image" -}}
{{- $tag := .tag | default .root.Values.image.tag | default .root.Chart.AppVersion -}}
{{ .root.Values.image.repository }}:{{ $tag }}
{{- end }}

{{- define "dovetail.scheme" -}}
{{ if .Values.gateway.tls.secretName }}https{{ else }}http{{ end }}
{{- end }}

{{- /* The service that every pod of the release reaches the gateway by, ready or not. */ -}}
{{- define "dovetail.headService" -}}
{{ include "dovetail.name" . }}-head
{{- end }}

{{- define "dovetail.podSecurity" -}}
runAsNonRoot: true
runAsUser: 999
runAsGroup: 999
fsGroup: 999
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "dovetail.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "dovetail.podAddress" -}}
- name: POD_ADDRESS
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: DOVETAIL_API_KEY
  valueFrom: {secretKeyRef: {name: {{ .Values.auth.secretName }}, key: api-key}}
{{- end }}

{{- define "dovetail.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* The operator's configuration, and the key that Prometheus reads /metrics with. */ -}}
{{- define "dovetail.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- $auth := default dict (get $config "auth") -}}
{{- $metrics := dict "name" "prometheus" "key" "${env.DOVETAIL_METRICS_KEY}" "metrics" true -}}
{{- $_ := set $auth "keys" (append (default list (get $auth "keys")) $metrics) -}}
{{- $_ := set $config "auth" $auth -}}
{{ toYaml $config }}
{{- end }}
