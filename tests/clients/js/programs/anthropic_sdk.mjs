// Anthropic's SDK: messages, streams, the tool runner with zod tools, schemas of answers.

import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { z } from "zod";
import { CITY, DESCRIPTION, FORECAST, NAME, QUESTION, WEATHER, report } from "./cases.mjs";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const ran = [];
const run = async (input) => {
  ran.push(input);
  return JSON.stringify(FORECAST);
};
const tools = [
  betaZodTool({ name: NAME, description: DESCRIPTION, inputSchema: CITY, run }),
  betaZodTool({
    name: "set_labels",
    description: "Sets labels.",
    inputSchema: z.object({ labels: z.record(z.string(), z.string()), when: z.iso.datetime().optional() }),
    run: async () => "set",
  }),
];
const fields = (text, max_tokens = 200) => ({
  model: "demo",
  max_tokens,
  temperature: 0,
  messages: [{ role: "user", content: text }],
});
const texts = (message) =>
  message.content
    .filter((block) => block.type === "text")
    .map((block) => block.text)
    .join("");

async function toolRunner() {
  ran.length = 0;
  const message = await client.beta.messages.toolRunner({ ...fields(WEATHER), tools });
  return [...ran, texts(message)];
}

async function streamedRunner() {
  ran.length = 0;
  let last;
  for await (const stream of client.beta.messages.toolRunner({ ...fields(WEATHER), tools, stream: true }))
    last = await stream.finalMessage();
  return [...ran, texts(last)];
}

async function cut() {
  const messages = [];
  for await (const message of client.beta.messages.toolRunner({ ...fields(WEATHER, 17), tools, max_iterations: 3 }))
    messages.push(message);
  const history = [...fields(WEATHER).messages, { role: "assistant", content: messages[0].content }];
  for (const block of messages[0].content.filter((one) => one.type === "tool_use"))
    history.push({ role: "user", content: [{ type: "tool_result", tool_use_id: block.id, content: "cut", is_error: true }] });
  const after = await client.messages.create({ ...fields("", 17), messages: [...history, ...fields(QUESTION).messages] });
  return [messages[0].stop_reason, after.type];
}

async function forced() {
  const plain = tools.map(({ name, description, input_schema }) => ({ name, description, input_schema }));
  const choice = { tool_choice: { type: "any" }, tools: plain };
  return (await client.messages.create({ ...fields(WEATHER), ...choice })).content.at(-1).name;
}

await report({
  text: async () => texts(await client.messages.create(fields(QUESTION))),
  stream: async () => texts(await client.messages.stream(fields(QUESTION)).finalMessage()),
  "tool runner": toolRunner,
  "streamed tool runner": streamedRunner,
  "cut tool runner": cut,
  any: forced,
});
