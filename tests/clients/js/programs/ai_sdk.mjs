// The AI SDK on @ai-sdk/openai-compatible: texts, streams, tool loops, objects; tools and schemas with z.record.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { CITY, DESCRIPTION, EXTRACT, FORECAST, NAME, PERSON, QUESTION, RECORD, WEATHER, report } from "./cases.mjs";

const provider = createOpenAICompatible({
  name: "local",
  baseURL: `${process.argv[2]}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const common = { model: provider("demo"), temperature: 0, maxRetries: 0, maxOutputTokens: 200 };
const weather = tool({ description: DESCRIPTION, inputSchema: CITY, execute: async () => FORECAST });
const asRecord = tool({ description: "Takes what was extracted.", inputSchema: z.object({ fields: RECORD }) });
const others = Object.fromEntries(
  Array.from({ length: 22 }, (_, i) => [`other_${i}`, tool({ inputSchema: z.object({ text: z.string() }) })]),
);

async function read(result) {
  const pieces = [];
  for await (const piece of result.textStream) pieces.push(piece);
  if (pieces.length < 2) throw new Error("not streamed");
  return pieces.join("");
}

const calls = (steps) => steps.flatMap((step) => step.toolCalls.map((call) => [call.toolName, call.input]));
const loop = { ...common, prompt: WEATHER, tools: { [NAME]: weather }, stopWhen: stepCountIs(3) };

async function streamedLoop() {
  const result = streamText(loop);
  const said = await read(result);
  return [...calls(await result.steps), said];
}

async function loopOf(settings) {
  const result = await generateText(settings);
  return [...calls(result.steps), result.text];
}

async function cut() {
  const first = await generateText({ ...loop, maxOutputTokens: 17 });
  const messages = [{ role: "user", content: WEATHER }, ...first.response.messages, { role: "user", content: QUESTION }];
  const second = await generateText({ ...loop, prompt: undefined, messages, maxOutputTokens: 17 });
  return [first.steps[0].finishReason, second.steps.length > 0];
}

async function forced() {
  const settings = { ...common, prompt: EXTRACT, tools: { as_record: asRecord, [NAME]: weather, ...others } };
  const result = await generateText({ ...settings, toolChoice: { type: "tool", toolName: "as_record" } });
  const [call] = result.toolCalls;
  return [call.toolName, call.invalid ?? false];
}

async function required() {
  const settings = { ...common, prompt: WEATHER, tools: { [NAME]: weather, as_record: asRecord, ...others } };
  return (await generateText({ ...settings, toolChoice: "required" })).toolCalls.length;
}

const object = async (schema) =>
  (await generateText({ ...common, prompt: EXTRACT, output: Output.object({ schema }) })).output;

await report({
  text: async () => (await generateText({ ...common, prompt: QUESTION })).text,
  stream: async () => read(streamText({ ...common, prompt: QUESTION })),
  usage: async () => (await generateText({ ...common, prompt: QUESTION })).usage.outputTokens,
  loop: () => loopOf(loop),
  "streamed loop": streamedLoop,
  "cut loop": cut,
  "forced record": forced,
  "required of 24": required,
  object: () => object(PERSON),
  "object with record": () => object(z.object({ name: z.string(), age: z.number(), city: z.string(), more: RECORD.optional() })),
});
