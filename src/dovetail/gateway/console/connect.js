// Settings of other clients for this server and its models, ready to copy.
import { partsFor, usable } from "./clients.js";
import { el } from "./dom.js";
import { Pages } from "./pages.js";
import { codeBlock } from "./render.js";

export const create = (section) => new Pages(section, usable, draw);

function draw(client, server) {
  const parts = partsFor(client.id, server).flatMap(({ file, language, text }) => [file ? el("h3", {}, file) : el("h3", {}, "In a terminal"), codeBlock(text, language)]);
  const key = server.hasKeys ? el("p.hint", {}, "YOUR_KEY stands for a key of this server; the page does not write yours here.") : null;
  return [el("p.hint", {}, client.about), ...parts, key].filter(Boolean);
}
