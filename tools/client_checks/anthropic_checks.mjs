// Anthropic's own client from npm.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { CITY_SCHEMA, MODEL, QUESTION, URL_ROOT, WANTED, checkCall, run } from "./common.mjs";

const client = new Anthropic({ baseURL: URL_ROOT, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const asked = { model: MODEL, max_tokens: 60, messages: [{ role: "user", content: QUESTION }], temperature: 0 };
const tool = { name: "get_forecast", description: "The weather of a city", input_schema: CITY_SCHEMA };
const forced = { tools: [tool], tool_choice: { type: "any", disable_parallel_tool_use: true } };

await run("@anthropic-ai/sdk", [
  ["chat", "messages and tokens", async () => {
    const answer = await client.messages.create(asked);
    assert.ok(answer.content[0].text.includes(WANTED));
    const counted = await client.messages.countTokens({ model: MODEL, messages: asked.messages });
    assert.equal(counted.input_tokens, answer.usage.input_tokens + answer.usage.cache_read_input_tokens);
  }],
  ["stream", "stream", async () => {
    const stream = client.messages.stream(asked);
    const streamed = await stream.finalMessage();
    const whole = await client.messages.create(asked);
    assert.equal(streamed.content[0].text, whole.content[0].text);
  }],
  ["tools", "forced call, whole and streamed, and its result", async () => {
    const whole = await client.messages.create({ ...asked, ...forced });
    const streamed = await client.messages.stream({ ...asked, ...forced }).finalMessage();
    for (const { content, stop_reason } of [whole, streamed]) {
      assert.equal(stop_reason, "tool_use");
      checkCall(content.at(-1).name, content.at(-1).input);
    }
    const result = { type: "tool_result", tool_use_id: whole.content.at(-1).id, content: "rain" };
    const said = [{ role: "assistant", content: whole.content }, { role: "user", content: [result] }];
    const after = await client.messages.create({ ...asked, messages: [...asked.messages, ...said] });
    assert.ok(after.content.length);
  }],
  ["structured output", "output_config", async () => {
    const output_config = { format: { type: "json_schema", schema: CITY_SCHEMA } };
    const answer = await client.messages.create({ ...asked, output_config });
    checkCall("get_forecast", answer.content[0].text);
  }],
]);
