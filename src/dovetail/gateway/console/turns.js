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
  const models = new Set();
  for (const node of news.nodes) {
    if (!lanes.has(node.node)) lanes.set(node.node, new Lane(devices, node.node));
    const lane = lanes.get(node.node);
    lane.take(node, news.now_s, news.window_s);
    lane.models().forEach((model) => models.add(model));
  }
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

  models() {
    return [...new Set([...this.turns.map(({ model }) => model), ...this.memory.flatMap(({ kv }) => Object.keys(kv))])];
  }

  take({ turns, memory }, now_s, window_s) {
    const new_turns = turns.map(({ model, ago_s, seconds }) => ({ model, at: now_s - ago_s, seconds }));
    const new_memory = memory.map(({ ago_s, kv_bytes }) => ({ at: now_s - ago_s, kv: kv_bytes }));
    const before = this.memory.at(-1);
    const in_window = ({ at }) => at >= now_s - window_s;
    const was_empty = !this.turns.length && !this.memory.length;
    this.turns = [...this.turns.filter(in_window), ...new_turns];
    this.memory = [...this.memory.filter(in_window), ...new_memory];
    if (was_empty && !this.turns.length && !this.memory.length && this.size) return;
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
    for (const { model, at, seconds } of turns) {
      this.pen.fillStyle = colour(model);
      this.pen.fillRect(x(at), 4, Math.max((this.size * seconds) / window_s, 0.6), TURNS - 8);
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
    const held = this.turns.reduce((sum, { seconds }) => sum + seconds, 0);
    const label = `${this.name}: ${this.turns.length} turns, ${held.toFixed(1)} s of ${window_s} s held`;
    if (this.canvas.getAttribute("aria-label") !== label) this.canvas.setAttribute("aria-label", label);
    setText(this.scale, `KV ${(this.most / 1e6).toFixed(1)} MB`);
  }
}
