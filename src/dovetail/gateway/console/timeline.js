// The last minute of every device: asks for what is new and has turns.js draw it.
import { el } from "./dom.js";
import { ask } from "./server.js";
import { drawTurns, forgetTurns, numCells } from "./turns.js";

export const create = (section) => new TurnsView(section);

class TurnsView {
  constructor(section) {
    this.told_s = 0; // by the server's clock
    this.cells = 0; // of the picture
    this.asking = null; // one at a time, or the same news would come twice
    const hint = "Who held which device over the last minute, turn by turn, and the KV memory of each model below it.";
    this.legend = el("div", { id: "legend" });
    this.devices = el("div", { id: "devices" });
    section.append(el("p.hint", {}, hint), this.legend, this.devices);
  }

  show() {}

  poll() {
    return (this.asking ??= this.takeNews().finally(() => (this.asking = null)));
  }

  async takeNews() {
    const cells = numCells(this.devices);
    if (cells !== this.cells) forgetTurns(), ([this.told_s, this.cells] = [0, cells]);
    let news = await ask("GET", `/api/turns/shares?cells=${cells}&after=${this.told_s}`);
    if (news.now_s < this.told_s) {
      forgetTurns();
      news = await ask("GET", `/api/turns/shares?cells=${cells}`);
    }
    this.told_s = news.now_s;
    return drawTurns(this.devices, this.legend, news);
  }
}
