"""Objects of Kubernetes against their schemas: lines of JSON, (case, object), in; lines of (case, kind, problem) out.

Runs in the environment of `make chart`, which has the schemas: those of Kubernetes by kubernetes-validate, for the
versions that are named; those of ScaledObject and ServiceMonitor by cloudcoil's models of their definitions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import ServiceMonitor
from pydantic import ValidationError

CUSTOM = {"ScaledObject": ScaledObject, "ServiceMonitor": ServiceMonitor}


def problems_of(resource: dict[str, Any], versions: list[str]) -> Iterator[str]:
    if resource["kind"] in CUSTOM:
        yield from custom_problems(resource)
        return
    for version in versions:
        try:
            kubernetes_validate.validate(resource, version, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
            yield f"{version}: {error.message}"


def custom_problems(resource: dict[str, Any]) -> Iterator[str]:
    """The models drop what they do not know, so that it is missing from what they write."""
    try:
        read = CUSTOM[resource["kind"]].model_validate(resource)
    except ValidationError as error:
        yield str(error)
        return
    kept = read.model_dump(mode="json", by_alias=True, exclude_unset=True)
    if kept != resource:
        yield f"unknown keys: only {json.dumps(kept)} is known of {json.dumps(resource)}"


def main() -> None:
    for line in sys.stdin:
        case, resource = json.loads(line)
        for problem in problems_of(resource, sys.argv[1:]):
            print(json.dumps([case, resource["kind"], problem]))


if __name__ == "__main__":
    main()
