// The system prompt, how tokens are drawn and whose tools are called, of one conversation; the next one begins with the
// same.
import { button, el } from "./dom.js";
import { CALM, SAMPLING, samplingProblem } from "./request.js";

// Shows them for a conversation; `servers`: of tools that may be called; `onsave` gets {system, sampling, tools}.
export function openSettings({ system, sampling, tools = [] }, recommended, servers, onsave) {
  const prompt = el("textarea", { id: "system", rows: 4, value: system, placeholder: "How the model should answer. Empty = as the model has it." });
  const thinks = el("select", { id: "thinks" }, new Option("usual", ""), new Option("off", "off"));
  if (sampling.thinks === false) thinks.value = "off";
  const inputs = SAMPLING.map((setting) => numberField(setting, sampling[setting.name], recommended[setting.name]));
  const boxes = servers.map((name) => el("input", { type: "checkbox", value: name, checked: tools.includes(name) }));
  const offered = boxes.map((box) => el("label.check", {}, box, box.value));
  const told = el("p.error", { role: "alert", hidden: true });
  const form = el(
    "form",
    { method: "dialog", noValidate: true },
    el("h2", {}, "Settings of this chat"),
    el("label", { htmlFor: "system" }, "System prompt"),
    prompt,
    el("div.fields", {}, ...inputs.map(({ node }) => node), el("label.field", {}, "Thinking", thinks, el("small", {}, "of models that can do without"))),
    ...(boxes.length ? [el("fieldset.tools-of", {}, el("legend", {}, "Tools that the server calls for the model"), ...offered)] : []),
    told,
    el("div.buttons", {}, button("Defaults", () => clear()), button("Cancel", () => dialog.close()), el("button.main", {}, "Save")),
  );
  const dialog = el("dialog.settings", { "aria-label": "Settings" }, form);
  const clear = () => {
    for (const { input } of inputs) input.value = "";
    for (const box of boxes) box.checked = false;
    [prompt.value, thinks.value] = ["", ""];
  };
  form.addEventListener("submit", (event) => {
    const problem = inputs.map(({ input, setting }) => samplingProblem(setting, input.value)).find(Boolean);
    told.hidden = !problem;
    told.textContent = problem || "";
    if (problem) return event.preventDefault();
    const chosen = inputs.filter(({ input }) => input.value.trim()).map(({ input, setting }) => [setting.name, Number(input.value)]);
    const called = boxes.filter(({ checked }) => checked).map(({ value }) => value);
    onsave({ system: prompt.value, tools: called, sampling: { ...Object.fromEntries(chosen), ...(thinks.value ? { thinks: false } : {}) } });
  });
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

function numberField(setting, value, recommended) {
  const usual = recommended ?? (setting.name === "temperature" ? CALM : null);
  const input = el("input", {
    inputMode: setting.min < 0 ? "text" : setting.step === 1 ? "numeric" : "decimal",
    id: `set-${setting.name}`,
    value: value ?? "",
    placeholder: usual === null ? "default" : String(usual),
  });
  return { setting, input, node: el("label.field", {}, setting.label, input, el("small", {}, setting.hint)) };
}
