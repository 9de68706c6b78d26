// OpenAI's own client for JavaScript.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { CITY_SCHEMA, MODEL, QUESTION, TEXTS, URL_ROOT, WANTED, checkCall, checkVectors, run } from "./common.mjs";

const client = new OpenAI({ baseURL: `${URL_ROOT}/v1`, apiKey: "none", maxRetries: 0 });
const options = { model: MODEL, messages: [{ role: "user", content: QUESTION }], temperature: 0, max_tokens: 60 };
const tools = [{ type: "function", function: { name: "get_forecast", description: "The weather", parameters: CITY_SCHEMA } }];
const content = async () => (await client.chat.completions.create(options)).choices[0].message.content;

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
  ["embeddings", "embeddings", async () => {
    const { data } = await client.embeddings.create({ model: MODEL, input: TEXTS });
    checkVectors(data.map(({ embedding }) => embedding));
  }],
]);
