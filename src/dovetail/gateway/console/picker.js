// A choice among this server's models, each with its state. Asks when it is shown and when it is opened, not by a clock.
import { bytes, el } from "./dom.js";
import { ask } from "./server.js";

const WORDS = { absent: "on disk", host: "in memory", loading: "loading", ready: "loaded", idle: "loaded", serving: "answering" };
const FRESH_MS = 2000;

export const isLoaded = ({ state }) => ["ready", "idle", "serving"].includes(state);

export function stateInWords({ state, tier, pull }) {
  if (pull?.error) return "not to be had";
  if (pull) {
    const share = pull.total_bytes ? ` ${Math.floor((100 * pull.done_bytes) / pull.total_bytes)} %` : "";
    return `${pull.stage || pull.state}${share}`;
  }
  return state === "absent" && tier === "remote" ? "not here" : WORDS[state] || state;
}

export class Picker {
  constructor(onchange = () => {}) {
    this.models = [];
    this.states = new Map(); // by name; empty for visitors who may not see them
    this.wanted = "";
    this.asked = 0;
    this.select = el("select", { "aria-label": "Model" });
    this.state = el("span.state");
    this.node = el("div.picker", {}, this.select, this.state);
    this.select.addEventListener("change", () => {
      this.wanted = this.select.value;
      this.showState();
      onchange(this.wanted);
    });
    const renew = () => Date.now() - this.asked > FRESH_MS && this.refresh().catch(() => {});
    this.select.addEventListener("pointerdown", renew);
    this.select.addEventListener("focus", renew);
  }

  get value() {
    return this.select.value;
  }

  choose(name) {
    this.wanted = name;
    if (this.models.some(({ id }) => id === name)) this.select.value = name;
    this.showState();
  }

  recommended(name) {
    return this.models.find(({ id }) => id === name)?.default_sampling_params || {};
  }

  async refresh() {
    this.asked = Date.now();
    const [models, states] = await Promise.all([ask("GET", "/v1/models"), ask("GET", "/api/models").catch(() => null)]);
    this.models = models.data;
    this.states = new Map((states?.data || []).map((state) => [state.name, state]));
    this.fill();
  }

  // Options that are there keep their place: a list that is open while it is filled anew would close.
  fill() {
    const { options } = this.select;
    while (options.length > this.models.length) options[options.length - 1].remove();
    this.models.forEach((model, place) => {
      const state = this.stateOf(model);
      const label = state ? `${model.id} · ${stateInWords(state)}` : model.id;
      if (!options[place]) this.select.append(new Option(label, model.id));
      else Object.assign(options[place], { value: model.id, text: label });
    });
    this.choose(this.wanted || this.value);
  }

  stateOf(model) {
    return model && this.states.get(model.root || model.id);
  }

  showState() {
    const state = this.stateOf(this.models.find(({ id }) => id === this.value));
    this.state.hidden = !state;
    if (!state) return;
    this.state.dataset.state = state.pull?.error ? "failed" : isLoaded(state) ? "loaded" : state.state;
    this.state.textContent = stateInWords(state);
    const size = state.weight_bytes || state.size_bytes;
    this.state.title = isLoaded(state) ? `${bytes(size)} in memory` : `${bytes(size)}; the first message loads it`;
  }
}
