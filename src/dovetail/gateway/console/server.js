// Requests to this server, with the visitor's key, and its streams as events.

export function problem(error) {
  const node = document.getElementById("problem");
  node.hidden = !error;
  node.textContent = error ? error.message || String(error) : "";
}

function headers() {
  const key = sessionStorage.getItem("key");
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function checked(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new Error(body.error?.message || `the server answers ${response.status}`);
}

// No answer of these is worth a place in the browser's cache.
export async function ask(method, path, body) {
  const sent = body && JSON.stringify(body);
  const response = await fetch(path, { method, headers: headers(), body: sent, cache: "no-store" });
  return (await checked(response)).json();
}

const MARK = ": dovetail "; // a comment that says what the answer waits for

export async function* events(path, body, signal, onWait) {
  const response = await checked(await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal }));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith(MARK)) onWait(JSON.parse(line.slice(MARK.length)));
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}
