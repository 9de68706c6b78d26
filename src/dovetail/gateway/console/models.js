// The models of this server: where each is and how it does, and adding, loading, unloading and removing them.
import { bytes, el, replaceIfNew } from "./dom.js";
import { isLoaded, stateInWords } from "./picker.js";
import { ask, problemText } from "./server.js";

const TIERS = { remote: "not here", disk: "disk", host: "host memory", device: "device" };
const percent = (share) => (share == null ? "–" : `${(share * 100).toFixed(0)} %`);

export const create = (section) => new ModelsView(section);

class ModelsView {
  constructor(section) {
    this.failures = new Map(); // by model: what went wrong with its last action
    this.name = el("input", { id: "add-name", required: true, autocomplete: "off", autocapitalize: "off", spellcheck: false });
    this.source = el("input", { id: "add-source", required: true, placeholder: "pypi:…, org/name, s3://…, a path", autocapitalize: "off", spellcheck: false });
    this.submit = el("button.main", {}, "Add");
    this.told = el("p.error", { id: "add-problem", role: "alert", hidden: true });
    const form = el(
      "form.bar",
      { id: "add", onsubmit: (event) => this.add(event) },
      el("label", {}, "Name", this.name),
      el("label.wide", {}, "Source", this.source),
      this.submit,
    );
    this.pulls = el("div", { id: "pulls" });
    this.table = el("tbody", { id: "table" });
    const heads = ["Model", "State", "Weights in", "Memory", "KV", "Met targets", "First token", ""];
    const head = el("thead", {}, el("tr", {}, ...heads.map((text) => el("th", {}, text))));
    section.append(form, this.told, this.pulls, el("div.scroll", {}, el("table.models", {}, head, this.table)));
  }

  show() {}

  // Says whether anything is new.
  async poll() {
    const { data } = await ask("GET", "/api/models");
    const records = data.map((model) => ({ ...model, failure: this.failures.get(model.name) }));
    const is_new = replaceIfNew(this.table, records, (record) => this.row(record));
    const coming = data.map(({ pull }) => pull).filter((pull) => ["waiting", "running"].includes(pull?.state));
    return replaceIfNew(this.pulls, coming, pullBar) || is_new;
  }

  row(model) {
    const failure = model.failure || model.pull?.error;
    const wait = model.ttft_p50_s == null ? "–" : `${model.ttft_p50_s.toFixed(2)} s`;
    const state = el("span.state", {}, stateInWords(model));
    state.dataset.state = model.pull?.error ? "failed" : isLoaded(model) ? "loaded" : model.state;
    const cells = [
      ["State", state],
      ["Weights in", TIERS[model.tier] || model.tier],
      ["Memory", bytes(model.weight_bytes)],
      ["KV", bytes(model.kv_bytes)],
      ["Met targets", percent(model.attainment)],
      ["First token", wait],
    ];
    const name = el("td.name", {}, model.name, failure ? el("p.error", { role: "alert" }, failure) : null);
    const figures = cells.map(([label, content]) => el("td", { "data-label": label }, content));
    const line = el("tr", {}, name, ...figures, el("td.actions", {}, ...this.actions(model)));
    line.dataset.model = model.name;
    line.dataset.state = model.state;
    return line;
  }

  actions(model) {
    const path = `/api/models/${encodeURIComponent(model.name)}`;
    const remove = this.action("Remove", model.name, "DELETE", path, `Offer ${model.name} no longer? Its files stay.`);
    if (model.pull) return [remove];
    if (isLoaded(model)) return [this.action("Unload", model.name, "POST", `${path}/unload`), remove];
    return [this.action("Load", model.name, "POST", `${path}/load`), remove];
  }

  action(label, model, method, path, question) {
    const button = el("button", { type: "button" }, label);
    button.addEventListener("click", async () => {
      if (question && !confirm(question)) return;
      button.disabled = true;
      this.failures.delete(model);
      try {
        await ask(method, path);
      } catch (error) {
        this.failures.set(model, problemText(error));
      }
      await this.renew();
    });
    return button;
  }

  // The form is emptied when the model is here or on its way, and kept when it is not.
  async add(event) {
    event.preventDefault();
    const body = { name: this.name.value.trim(), source: this.source.value.trim() };
    this.submit.disabled = true;
    this.told.hidden = true;
    try {
      await ask("POST", "/api/models", body);
      event.target.reset();
    } catch (error) {
      this.told.textContent = problemText(error);
      this.told.hidden = false;
    }
    this.submit.disabled = false;
    await this.renew();
  }

  async renew() {
    for (const line of this.table.children) line.shown = null; // its buttons are to be used again
    await this.poll().catch(() => {}); // told when it is asked next
  }
}

function pullBar(pull) {
  const share = pull.total_bytes ? ` ${((100 * pull.done_bytes) / pull.total_bytes).toFixed(0)} %` : "";
  const from = pull.source ? ` from ${pull.source}` : "";
  const bar = el("progress", { "aria-label": pull.name });
  if (pull.total_bytes) [bar.max, bar.value] = [pull.total_bytes, pull.done_bytes];
  return el("div.pull", {}, `${pull.name}${from}: ${pull.stage || pull.state}${share}`, bar);
}
