// The picture of the last minute: per device a lane of turns coloured by model, and under it each model's KV memory.
// What has been drawn is moved to the left and the news are drawn at the right, because drawing all of it anew costs ten
// times as much; while nothing happens and nothing is left to move, nothing is drawn.

const COLOURS = ["#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#ec4899", "#14b8a6", "#a16207"];
const HEIGHT = 140, TURNS = 60;
const colours = new Map(); // by model
const lanes = new Map(); // by node

function colour(model) {
  if (!colours.has(model)) colours.set(model, COLOURS[colours.size % COLOURS.length]);
  return colours.get(model);
}

// Up to 1, 2 or 5 times a power of ten: the scale stays while the memory grows a little.
function rounded(count) {
  const ten = 10 ** Math.floor(Math.log10(count));
  return ten * [1, 2, 5, 10].find((step) => step * ten >= count);
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Of a server that was started anew: its clock may be another.
export function forgetTurns() {
  lanes.forEach((lane) => lane.node.remove());
  lanes.clear();
}

// Takes the news; says whether anything is in the picture.
export function drawTurns(devices, legend, news) {
  const told = new Set(news.nodes.map(({ node }) => node));
  for (const [name, lane] of lanes) if (!told.has(name)) lanes.delete(name), lane.node.remove();
  for (const node of news.nodes) {
    if (!lanes.has(node.node)) lanes.set(node.node, new Lane(devices, node.node));
    lanes.get(node.node).take(node, news.now_s, news.window_s);
  }
  const models = new Set([...lanes.values()].flatMap((lane) => [...lane.seen.keys()]));
  showLegend(legend, [...models]);
  return models.size > 0;
}

function showLegend(legend, models) {
  const shown = models.join(" ");
  if (legend.dataset.shown === shown && legend.childNodes.length) return;
  legend.dataset.shown = shown;
  legend.replaceChildren(...models.map(entry));
  if (!models.length) legend.textContent = "Nothing has run during the last minute.";
}

function entry(model) {
  const node = document.createElement("span"), mark = document.createElement("i");
  mark.style.background = colour(model);
  node.append(mark, model);
  return node;
}

function make(parent, kind, name) {
  const node = document.createElement(kind);
  node.className = name;
  parent.append(node);
  return node;
}

class Lane {
  constructor(devices, name) {
    this.name = name;
    this.turns = []; // {model, at, seconds}: `at` by the server's clock
    this.memory = []; // {at, kv}
    this.seen = new Map(); // of each model, how often it is in both
    this.held_s = 0; // by all turns
    this.node = make(devices, "div", "device");
    this.node.dataset.node = name;
    make(this.node, "div", "").textContent = name;
    const picture = make(this.node, "div", "picture");
    this.canvas = make(picture, "canvas", "");
    this.canvas.setAttribute("role", "img");
    this.scale = make(picture, "span", "scale");
    this.begin = make(picture, "span", "begin");
    make(picture, "span", "end").textContent = "now";
    this.size = 0; // of the canvas as it was drawn last
    this.most = 1; // bytes at the top of the memory
    this.drawn_s = 0; // where the right edge stands
  }

  // There are tens of thousands of turns in a busy minute, so none is looked at but those that come and go.
  count(turns, memory, by) {
    for (const { model, seconds } of turns) this.add(model, by), (this.held_s += by * seconds);
    for (const { kv } of memory) Object.keys(kv).forEach((model) => this.add(model, by));
  }

  add(model, by) {
    const count = (this.seen.get(model) || 0) + by;
    if (count) this.seen.set(model, count);
    else this.seen.delete(model);
  }

  forget(before_s) {
    const gone = (list) => list.splice(0, list.findIndex(({ at }) => at >= before_s) >>> 0);
    this.count(gone(this.turns), gone(this.memory), -1);
  }

  take({ turns, memory }, now_s, window_s) {
    const new_turns = turns.map(({ model, ago_s, seconds }) => ({ model, at: now_s - ago_s, seconds }));
    const new_memory = memory.map(({ ago_s, kv_bytes }) => ({ at: now_s - ago_s, kv: kv_bytes }));
    const before = this.memory.at(-1);
    const was_empty = !this.seen.size;
    this.forget(now_s - window_s);
    this.count(new_turns, new_memory, 1);
    new_turns.forEach((turn) => this.turns.push(turn));
    new_memory.forEach((state) => this.memory.push(state));
    if (was_empty && !this.seen.size && this.size) return;
    setText(this.begin, `${window_s} s ago`);
    const most = rounded(Math.max(1, ...this.memory.flatMap(({ kv }) => Object.values(kv))));
    const width = this.canvas.clientWidth || 600;
    if (most !== this.most || width !== this.size) this.drawAll(width, most, now_s, window_s);
    else this.drawNews(new_turns, before ? [before, ...new_memory] : new_memory, now_s, window_s);
    this.say(window_s);
  }

  drawAll(width, most, now_s, window_s) {
    const ratio = devicePixelRatio || 1;
    [this.size, this.most, this.drawn_s] = [width, most, now_s];
    [this.canvas.width, this.canvas.height] = [width * ratio, HEIGHT * ratio];
    this.pen = this.canvas.getContext("2d");
    this.pen.scale(ratio, ratio);
    this.draw(this.turns, this.memory, window_s);
  }

  drawNews(turns, memory, now_s, window_s) {
    const ratio = devicePixelRatio || 1, step_s = window_s / this.canvas.width;
    const pixels = Math.floor((now_s - this.drawn_s) / step_s); // whole ones, so that nothing is blurred
    this.drawn_s += pixels * step_s;
    if (pixels > 0) {
      this.pen.globalCompositeOperation = "copy";
      this.pen.drawImage(this.canvas, -pixels / ratio, 0, this.canvas.width / ratio, HEIGHT);
      this.pen.globalCompositeOperation = "source-over";
    }
    this.draw(turns, memory, window_s);
  }

  draw(turns, memory, window_s) {
    const x = (at) => this.size * (1 - (this.drawn_s - at) / window_s);
    const y = (count) => HEIGHT - 4 - ((HEIGHT - TURNS - 12) * count) / this.most;
    let drawn = null; // what the last rectangle shows, up to where: most turns are shorter than a pixel
    for (const { model, at, seconds } of turns) {
      const left = x(at), width = Math.max((this.size * seconds) / window_s, 0.6);
      if (drawn && drawn.model === model && left + width <= drawn.end) continue;
      drawn = { model, end: left + Math.max(width, 1) };
      this.pen.fillStyle = colour(model);
      this.pen.fillRect(left, 4, Math.max(width, 1), TURNS - 8);
    }
    this.pen.lineWidth = 2;
    for (const model of new Set(memory.flatMap(({ kv }) => Object.keys(kv)))) {
      this.pen.strokeStyle = colour(model);
      this.pen.beginPath();
      memory.forEach(({ at, kv }, place) => this.pen[place ? "lineTo" : "moveTo"](x(at), y(kv[model] || 0)));
      this.pen.stroke();
    }
  }

  say(window_s) {
    const label = `${this.name}: ${this.turns.length} turns, ${Math.abs(this.held_s).toFixed(1)} s of ${window_s} s held`;
    if (this.canvas.getAttribute("aria-label") !== label) this.canvas.setAttribute("aria-label", label);
    setText(this.scale, `KV ${(this.most / 1e6).toFixed(1)} MB`);
  }
}
