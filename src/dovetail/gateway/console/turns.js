// The picture of the last minute: per device a lane of turns coloured by model, and under it each model's KV memory.
// The minute is cut into as many cells as the picture has columns. A turn that is longer than a cell fills columns of its
// own; shorter ones share a column, each model by the time that it held the device. Iterations of best effort alone are
// striped, above the others. What has been drawn is moved to the
// left and the news are drawn at the right, because drawing all of it anew costs ten times as much; while nothing
// happens and nothing is left to move, nothing is drawn.

const COLOURS = ["#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#ec4899", "#14b8a6", "#a16207"];
const HEIGHT = 140, TURNS = 60;
const STRIPE = 3; // lines of best effort that are drawn, and between them those that are not
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

// One cell to a column of the screen.
export function numCells(devices) {
  return Math.min(Math.max(Math.floor((devices.clientWidth - 2) * (devicePixelRatio || 1)), 100), 10000);
}

// Of a server that was started anew (its clock may be another), or of a picture of another size.
export function forgetTurns() {
  lanes.forEach((lane) => lane.node.remove());
  lanes.clear();
}

// Takes the news; says whether there were any.
export function drawTurns(devices, legend, news) {
  const told = new Set(news.nodes.map(({ node }) => node));
  for (const [name, lane] of lanes) if (!told.has(name)) lanes.delete(name), lane.node.remove();
  for (const node of news.nodes) {
    if (!lanes.has(node.node)) lanes.set(node.node, new Lane(devices, node.node));
    lanes.get(node.node).take(node, news);
  }
  const models = new Set([...lanes.values()].flatMap((lane) => [...lane.seen.keys()]));
  const has_best_effort = [...lanes.values()].some((lane) => lane.best_effort_cells);
  showLegend(legend, [...models], has_best_effort);
  return news.nodes.some(({ cells, memory }) => cells.length || memory.length);
}

function showLegend(legend, models, has_best_effort) {
  const shown = [...models, has_best_effort].join(" ");
  if (legend.dataset.shown === shown && legend.childNodes.length) return;
  legend.dataset.shown = shown;
  legend.replaceChildren(...models.map(entry), ...(has_best_effort ? [stripes()] : []));
  if (!models.length) legend.textContent = "Nothing has run during the last minute.";
}

function entry(model) {
  const node = document.createElement("span"), mark = document.createElement("i");
  mark.style.background = colour(model);
  node.append(mark, model);
  return node;
}

function stripes() {
  const node = document.createElement("span"), mark = document.createElement("i");
  mark.className = "striped";
  node.append(mark, "striped: best effort alone");
  return node;
}

function make(parent, kind, name) {
  const node = document.createElement(kind);
  node.className = name;
  parent.append(node);
  return node;
}

// The same lines in every column, so that columns beside each other make stripes.
function striped(pen, left, top, bottom) {
  for (let line = Math.floor(top / (2 * STRIPE)) * 2 * STRIPE; line < bottom; line += 2 * STRIPE) {
    const first = Math.max(line, top), last = Math.min(line + STRIPE, bottom);
    if (last > first) pen.fillRect(left, first, 1, last - first);
  }
}

class Lane {
  constructor(devices, name) {
    this.name = name;
    this.cells = new Map(); // by number: {turns, held_s by model, best_effort_s of these}
    this.best_effort_cells = 0; // with any of it
    this.memory = []; // {at, kv}: `at` by the server's clock
    this.seen = new Map(); // of each model, how often it is in both
    this.node = make(devices, "div", "device");
    this.node.dataset.node = name;
    make(this.node, "div", "").textContent = name;
    const picture = make(this.node, "div", "picture");
    this.canvas = make(picture, "canvas", "");
    this.canvas.setAttribute("role", "img");
    this.scale = make(picture, "span", "scale");
    this.begin = make(picture, "span", "begin");
    make(picture, "span", "end").textContent = "now";
    this.most = 0; // bytes at the top of the memory
    this.edge = 0; // the cell at the right edge
  }

  count(model, by) {
    const count = (this.seen.get(model) || 0) + by;
    if (count) this.seen.set(model, count);
    else this.seen.delete(model);
  }

  forget(before, before_s) {
    for (const [number, { held_s, best_effort_s }] of this.cells) {
      if (number >= before) continue;
      this.cells.delete(number);
      if (Object.keys(best_effort_s).length) this.best_effort_cells -= 1;
      Object.keys(held_s).forEach((model) => this.count(model, -1));
    }
    while (this.memory.length && this.memory[0].at < before_s)
      Object.keys(this.memory.shift().kv).forEach((model) => this.count(model, -1));
  }

  add({ cell, turns, held_s, best_effort_s }) {
    if (!this.cells.has(cell)) this.cells.set(cell, { turns: 0, held_s: {}, best_effort_s: {} });
    const known = this.cells.get(cell), had_best_effort = Object.keys(known.best_effort_s).length > 0;
    known.turns += turns;
    for (const [model, seconds] of Object.entries(best_effort_s)) known.best_effort_s[model] = (known.best_effort_s[model] || 0) + seconds;
    if (!had_best_effort && Object.keys(known.best_effort_s).length) this.best_effort_cells += 1;
    for (const [model, seconds] of Object.entries(held_s)) {
      if (!(model in known.held_s)) this.count(model, 1);
      known.held_s[model] = (known.held_s[model] || 0) + seconds;
    }
  }

  take({ cells, memory }, { now_s, window_s, cell_s }) {
    const new_memory = memory.map(({ ago_s, kv_bytes }) => ({ at: now_s - ago_s, kv: kv_bytes }));
    const before = this.memory.at(-1);
    const was_empty = !this.seen.size;
    const edge = Math.floor(now_s / cell_s);
    this.forget(edge - Math.round(window_s / cell_s), now_s - window_s);
    cells.forEach((cell) => this.add(cell));
    for (const state of new_memory) this.memory.push(state), Object.keys(state.kv).forEach((model) => this.count(model, 1));
    if (was_empty && !this.seen.size && this.most) return;
    const most = rounded(Math.max(1, ...this.memory.flatMap(({ kv }) => Object.values(kv))));
    if (most !== this.most) this.drawAll(most, edge, window_s, cell_s);
    else this.drawNews(cells, before ? [before, ...new_memory] : new_memory, edge, cell_s);
    this.say(window_s);
  }

  drawAll(most, edge, window_s, cell_s) {
    const ratio = devicePixelRatio || 1;
    [this.most, this.edge] = [most, edge];
    [this.canvas.width, this.canvas.height] = [Math.round(window_s / cell_s), HEIGHT * ratio];
    this.pen = this.canvas.getContext("2d");
    this.pen.scale(1, ratio); // across, one cell is one column
    this.drawCells(this.cells.keys(), cell_s);
    this.drawMemory(this.memory, cell_s);
  }

  drawNews(cells, memory, edge, cell_s) {
    if (edge > this.edge) {
      this.pen.globalCompositeOperation = "copy";
      this.pen.drawImage(this.canvas, this.edge - edge, 0, this.canvas.width, HEIGHT);
      this.pen.globalCompositeOperation = "source-over";
      this.edge = edge;
    }
    this.drawCells(cells.map(({ cell }) => cell), cell_s);
    this.drawMemory(memory, cell_s);
  }

  drawCells(numbers, cell_s) {
    const whole = TURNS - 8;
    for (const number of numbers) {
      const left = this.canvas.width - 1 - this.edge + number;
      const { held_s, best_effort_s } = this.cells.get(number) ?? { held_s: {}, best_effort_s: {} };
      let bottom = whole + 4;
      this.pen.clearRect(left, 4, 1, whole);
      const fill = (model, seconds, is_striped) => {
        const top = bottom - Math.min(whole * (seconds / cell_s), bottom - 4);
        this.pen.fillStyle = colour(model);
        if (is_striped) striped(this.pen, left, top, bottom);
        else this.pen.fillRect(left, top, 1, bottom - top);
        bottom = top;
      };
      const models = Object.keys(held_s).sort();
      for (const model of models) fill(model, held_s[model] - (best_effort_s[model] || 0), false);
      for (const model of models) fill(model, best_effort_s[model] || 0, true);
    }
  }

  drawMemory(memory, cell_s) {
    const x = (at) => this.canvas.width - 1 - this.edge + at / cell_s;
    const y = (count) => HEIGHT - 4 - ((HEIGHT - TURNS - 12) * count) / this.most;
    this.pen.lineWidth = 2;
    for (const model of new Set(memory.flatMap(({ kv }) => Object.keys(kv)))) {
      this.pen.strokeStyle = colour(model);
      this.pen.beginPath();
      memory.forEach(({ at, kv }, place) => this.pen[place ? "lineTo" : "moveTo"](x(at), y(kv[model] || 0)));
      this.pen.stroke();
    }
  }

  say(window_s) {
    let turns = 0, held = 0;
    for (const cell of this.cells.values()) {
      turns += cell.turns;
      for (const seconds of Object.values(cell.held_s)) held += seconds;
    }
    const label = `${this.name}: ${turns} turns, ${held.toFixed(1)} s of ${window_s} s held`;
    if (this.canvas.getAttribute("aria-label") !== label) this.canvas.setAttribute("aria-label", label);
    setText(this.begin, `${window_s} s ago`);
    setText(this.scale, `KV ${(this.most / 1e6).toFixed(1)} MB`);
  }
}
