// The system prompt and how tokens are drawn, of one conversation; the next one begins with the same.
import { button, el } from "./dom.js";
import { CALM, SAMPLING, samplingProblem } from "./request.js";

// Shows them for a conversation; `onsave` gets {system, sampling}.
export function openSettings({ system, sampling }, recommended, onsave) {
  const prompt = el("textarea", { id: "system", rows: 4, value: system, placeholder: "How the model should answer. Empty = as the model has it." });
  const thinks = el("select", { id: "thinks" }, new Option("usual", ""), new Option("off", "off"));
  if (sampling.thinks === false) thinks.value = "off";
  const inputs = SAMPLING.map((setting) => numberField(setting, sampling[setting.name], recommended[setting.name]));
  const told = el("p.error", { role: "alert", hidden: true });
  const form = el(
    "form",
    { method: "dialog", noValidate: true },
    el("h2", {}, "Settings of this chat"),
    el("label", { htmlFor: "system" }, "System prompt"),
    prompt,
    el("div.fields", {}, ...inputs.map(({ node }) => node), el("label.field", {}, "Thinking", thinks, el("small", {}, "of models that can do without"))),
    told,
    el("div.buttons", {}, button("Defaults", () => clear()), button("Cancel", () => dialog.close()), el("button.main", {}, "Save")),
  );
  const dialog = el("dialog.settings", { "aria-label": "Settings" }, form);
  const clear = () => {
    for (const { input } of inputs) input.value = "";
    [prompt.value, thinks.value] = ["", ""];
  };
  form.addEventListener("submit", (event) => {
    const problem = inputs.map(({ input, setting }) => samplingProblem(setting, input.value)).find(Boolean);
    told.hidden = !problem;
    told.textContent = problem || "";
    if (problem) return event.preventDefault();
    const chosen = inputs.filter(({ input }) => input.value.trim()).map(({ input, setting }) => [setting.name, Number(input.value)]);
    onsave({ system: prompt.value, sampling: { ...Object.fromEntries(chosen), ...(thinks.value ? { thinks: false } : {}) } });
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
