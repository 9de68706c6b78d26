// OpenAI's own client for JavaScript.
import assert from "node:assert/strict";
import OpenAI, { toFile } from "openai";
import { CITY_SCHEMA, MODEL, QUESTION, TEXTS, URL_ROOT, WANTED, checkCall, checkVectors, run } from "./common.mjs";

const client = new OpenAI({ baseURL: `${URL_ROOT}/v1`, apiKey: "none", maxRetries: 0 });
const options = { model: MODEL, messages: [{ role: "user", content: QUESTION }], temperature: 0, max_tokens: 60 };
const tools = [{ type: "function", function: { name: "get_forecast", description: "The weather", parameters: CITY_SCHEMA } }];
const content = async () => (await client.chat.completions.create(options)).choices[0].message.content;

const line = (custom_id, content) => ({ custom_id, method: "POST", url: "/v1/chat/completions", body: { ...options, max_tokens: 16, messages: [{ role: "user", content }] } });

async function submit(lines) {
  const file = await toFile(Buffer.from(lines.map((one) => JSON.stringify(one) + "\n").join("")), "lines.jsonl");
  const { id } = await client.files.create({ file, purpose: "batch" });
  return (await client.batches.create({ input_file_id: id, endpoint: "/v1/chat/completions", completion_window: "24h" })).id;
}

async function ended(id) {
  for (let tries = 0; tries < 1500; tries += 1) {
    const batch = await client.batches.retrieve(id);
    if (["completed", "failed", "expired", "cancelled"].includes(batch.status)) return batch;
    await new Promise((resolve) => setTimeout(resolve, 200));
  }
  throw new Error(`${id} has not ended`);
}

const results = async (id) => (await (await client.files.content(id)).text()).trim().split("\n").map((text) => JSON.parse(text));

await run("openai", [
  ["chat", "chat", async () => assert.ok((await content()).includes(WANTED))],
  ["chat", "responses", async () => assert.ok((await client.responses.create({ model: MODEL, input: QUESTION, temperature: 0 })).output_text.includes(WANTED))],
  ["stream", "stream", async () => {
    let text = "";
    for await (const chunk of await client.chat.completions.create({ ...options, stream: true })) text += chunk.choices[0]?.delta.content ?? "";
    assert.equal(text, await content());
  }],
  ["stream", "stream helper", async () => assert.equal(await client.chat.completions.stream(options).finalContent(), await content())],
  ["tools", "required", async () => {
    const answer = await client.chat.completions.create({ ...options, tools, tool_choice: "required", parallel_tool_calls: false });
    for (const { function: called } of answer.choices[0].message.tool_calls) checkCall(called.name, called.arguments);
  }],
  ["tools", "streamed", async () => {
    const stream = client.chat.completions.stream({ ...options, tools, tool_choice: "required", parallel_tool_calls: false });
    const { function: called } = (await stream.finalMessage()).tool_calls[0];
    checkCall(called.name, called.arguments);
  }],
  ["structured output", "json_schema", async () => {
    const response_format = { type: "json_schema", json_schema: { name: "forecast", schema: CITY_SCHEMA, strict: true } };
    const answer = await client.chat.completions.parse({ ...options, response_format });
    checkCall("get_forecast", answer.choices[0].message.content);
  }],
  ["batch", "batch with outputs and errors", async () => {
    const id = await submit([...Array(5).keys()].map((number) => line(`line-${number}`, QUESTION)).concat(line("too-long", "far too long ".repeat(9000))));
    const batch = await ended(id);
    assert.equal(batch.status, "completed");
    assert.deepEqual(batch.request_counts, { total: 6, completed: 5, failed: 1 });
    const answers = await results(batch.output_file_id), wrong = await results(batch.error_file_id);
    assert.equal(new Set(answers.map((one) => one.custom_id)).size, 5);
    for (const one of answers) assert.ok(one.response.body.choices[0].message.content.includes(WANTED));
    assert.deepEqual(wrong.map((one) => [one.custom_id, one.response.status_code]), [["too-long", 400]]);
  }],
  ["batch", "batch cancelled", async () => {
    const id = await submit([...Array(400).keys()].map((number) => line(`line-${number}`, QUESTION)));
    await client.batches.cancel(id);
    assert.equal((await ended(id)).status, "cancelled");
  }],
  ["embeddings", "embeddings", async () => {
    const { data } = await client.embeddings.create({ model: MODEL, input: TEXTS });
    checkVectors(data.map(({ embedding }) => embedding));
  }],
]);
