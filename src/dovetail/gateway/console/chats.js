// Conversations, kept in this browser alone: each under a name of its own, so that two tabs do not write over each other.

const PREFIX = "dovetail.chat.";
const LAST_SETTINGS = "dovetail.settings";
const MAX_TITLE = 60;

// {id, title, updated, model, system, sampling, tools, messages: [{role, content, thought?, calls?, note?, error?, model?}]}
export function newChat() {
  const before = read(LAST_SETTINGS) || {};
  const id = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
  return { id, title: "", updated: 0, model: before.model || "", system: before.system || "", sampling: before.sampling || {}, tools: before.tools || [], messages: [] };
}

export function allChats() {
  return names().map(read).filter((chat) => chat?.messages).sort((one, other) => other.updated - one.updated);
}

export const findChat = (id) => read(PREFIX + id);

// An empty one is not worth keeping. Where the browser's room is full, the oldest ones give way.
export function saveChat(chat) {
  if (!chat.messages.length) return;
  chat.title ||= title(chat.messages[0].content);
  write(PREFIX + chat.id, chat, chat.id);
}

export function rememberSettings({ model, system, sampling, tools }) {
  write(LAST_SETTINGS, { model, system, sampling, tools }, null);
}

export function removeChat(id) {
  localStorage.removeItem(PREFIX + id);
}

export function removeAllChats() {
  names().forEach((name) => localStorage.removeItem(name));
}

export const isChatKey = (name) => name === null || name.startsWith(PREFIX);

function title(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE).trimEnd()}…` : line;
}

function names() {
  return Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
}

function read(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null; // not ours, or cut off
  }
}

function write(name, value, own) {
  const text = JSON.stringify(value);
  for (;;) {
    try {
      return localStorage.setItem(name, text);
    } catch (error) {
      const oldest = allChats().filter(({ id }) => id !== own).at(-1);
      if (!oldest) throw new Error("The browser has no room for this conversation; it is lost when the page is closed.", { cause: error });
      removeChat(oldest.id);
    }
  }
}
