// Vercel's AI SDK, with its provider for servers like OpenAI's.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";
import { MODEL, QUESTION, TEXTS, URL_ROOT, WANTED, checkCall, checkVectors, run } from "./common.mjs";

const provider = createOpenAICompatible({ name: "dovetail", baseURL: `${URL_ROOT}/v1`, apiKey: "none", supportsStructuredOutputs: true });
const options = { model: provider(MODEL), prompt: QUESTION, temperature: 0, maxOutputTokens: 60, maxRetries: 0 };
const schema = z.object({ city: z.string().max(12), days: z.number().int().min(1).max(9) });
const tools = { get_forecast: tool({ description: "The weather", inputSchema: schema }) };
const single = { providerOptions: { dovetail: { parallel_tool_calls: false } } };
const named = { type: "tool", toolName: "get_forecast" };

await run("ai", [
  ["chat", "generateText", async () => assert.ok((await generateText(options)).text.includes(WANTED))],
  ["stream", "streamText", async () => {
    let text = "";
    for await (const part of streamText(options).textStream) text += part;
    assert.equal(text, (await generateText(options)).text);
  }],
  ["tools", "required and named", async () => {
    for (const toolChoice of ["required", named]) {
      const { toolCalls } = await generateText({ ...options, ...single, tools, toolChoice });
      assert.ok(toolCalls.length > 0);
      toolCalls.forEach(({ toolName, input }) => checkCall(toolName, input));
    }
    await generateText({ ...options, tools, toolChoice: "auto" });
  }],
  ["tools", "streamed", async () => {
    const calls = await streamText({ ...options, ...single, tools, toolChoice: "required" }).toolCalls;
    assert.ok(calls.length > 0);
    calls.forEach(({ toolName, input }) => checkCall(toolName, input));
  }],
  ["structured output", "generateObject", async () => checkCall("get_forecast", (await generateObject({ ...options, schema })).object)],
  ["embeddings", "embedMany", async () => {
    const { embeddings } = await embedMany({ model: provider.textEmbeddingModel(MODEL), values: TEXTS });
    checkVectors(embeddings);
  }],
]);
