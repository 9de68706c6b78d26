// The picture of the last minute: per device a lane of turns coloured by model, and under it each model's KV memory.

const COLOURS = ["#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#ec4899", "#14b8a6", "#a16207"];
const known = new Map();

function colour(model) {
  if (!known.has(model)) known.set(model, COLOURS[known.size % COLOURS.length]);
  return known.get(model);
}

export function drawTurns(devices, legend, history) {
  const models = new Set();
  const wanted = history.nodes.map(({ node }) => node);
  for (const old of [...devices.children]) if (!wanted.includes(old.dataset.node)) old.remove();
  for (const node of history.nodes) {
    node.turns.forEach(({ model }) => models.add(model));
    node.memory.forEach(({ kv_bytes }) => Object.keys(kv_bytes).forEach((model) => models.add(model)));
    draw(lane(devices, node.node), node, history.window_s);
  }
  legend.replaceChildren(...[...models].map(entry));
  if (!models.size) legend.textContent = "Nothing has run during the last minute.";
}

function entry(model) {
  const node = document.createElement("span"), mark = document.createElement("i");
  mark.style.background = colour(model);
  node.append(mark, model);
  return node;
}

function lane(devices, name) {
  const found = [...devices.children].find((child) => child.dataset.node === name);
  if (found) return found.querySelector("canvas");
  const node = document.createElement("div"), title = document.createElement("div"), canvas = document.createElement("canvas");
  node.className = "device";
  node.dataset.node = name;
  title.textContent = name;
  canvas.setAttribute("role", "img");
  node.append(title, canvas);
  devices.append(node);
  return canvas;
}

function draw(canvas, node, window_s) {
  const scale = devicePixelRatio || 1, width = canvas.clientWidth || 600, height = 140, turns = 60;
  [canvas.width, canvas.height] = [width * scale, height * scale];
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const x = (ago) => width * (1 - ago / window_s);
  for (const { model, ago_s, seconds } of node.turns) {
    pen.fillStyle = colour(model);
    pen.fillRect(x(ago_s), 4, Math.max((width * seconds) / window_s, 0.6), turns - 8);
  }
  const most = Math.max(1, ...node.memory.flatMap(({ kv_bytes }) => Object.values(kv_bytes)));
  const seen = new Set(node.memory.flatMap(({ kv_bytes }) => Object.keys(kv_bytes)));
  const y = (count) => height - 4 - ((height - turns - 12) * count) / most;
  for (const model of seen) {
    pen.strokeStyle = colour(model);
    pen.lineWidth = 2;
    pen.beginPath();
    node.memory.forEach(({ ago_s, kv_bytes }, at) => pen[at ? "lineTo" : "moveTo"](x(ago_s), y(kv_bytes[model] || 0)));
    pen.stroke();
  }
  pen.fillStyle = getComputedStyle(canvas).color;
  pen.font = "11px system-ui, sans-serif";
  pen.fillText(`${window_s} s ago`, 4, height - 6);
  pen.fillText("now", width - 26, height - 6);
  pen.fillText(`KV ${(most / 1e6).toFixed(1)} MB`, 4, turns + 12);
  const held = node.turns.reduce((sum, { seconds }) => sum + seconds, 0);
  canvas.setAttribute("aria-label", `${node.node}: ${node.turns.length} turns, ${held.toFixed(1)} s of ${window_s} s held`);
  canvas.title = `KV memory up to ${(most / 1e6).toFixed(1)} MB`;
}
