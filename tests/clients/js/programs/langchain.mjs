// LangChain.js on @langchain/openai, over chat completions and responses; tools and schemas with z.record.

import { HumanMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { CITY, DESCRIPTION, EXTRACT, FORECAST, NAME, PERSON, QUESTION, RECORD, WEATHER, report } from "./cases.mjs";
import { z } from "zod";

const fields = { model: "demo", apiKey: "none", temperature: 0, maxRetries: 0, maxTokens: 200 };
const configuration = { baseURL: `${process.argv[2]}/v1` };
const weather = tool(async () => JSON.stringify(FORECAST), { name: NAME, description: DESCRIPTION, schema: CITY });

async function stream(model) {
  const pieces = [];
  for await (const chunk of await model.stream(QUESTION)) pieces.push(chunk.text);
  if (pieces.length < 2) throw new Error("not streamed");
  return pieces.join("");
}

async function loop(model) {
  const bound = model.bindTools([weather]);
  const messages = [new HumanMessage(WEATHER)];
  messages.push(await bound.invoke(messages));
  const calls = messages.at(-1).tool_calls;
  for (const call of calls) messages.push(await weather.invoke(call));
  return [...calls.map((call) => [call.name, call.args]), (await bound.invoke(messages)).text];
}

async function cut(model) {
  const bound = model.bindTools([weather]);
  const messages = [new HumanMessage(WEATHER)];
  messages.push(await bound.invoke(messages), new HumanMessage(QUESTION));
  return typeof (await bound.invoke(messages)).text;
}

const named = async (model) =>
  (await model.bindTools([weather], { tool_choice: NAME }).invoke(QUESTION)).tool_calls[0].name;
const structured = (model, schema, method) =>
  model.withStructuredOutput(schema, { method, name: "person" }).invoke(EXTRACT);

const withRecord = PERSON.extend({ more: z.record(z.string(), z.string()).optional() });
const cases = {};
for (const [name, more] of Object.entries({ chat: {}, responses: { useResponsesApi: true } })) {
  const model = new ChatOpenAI({ ...fields, ...more, configuration });
  cases[`${name} text`] = async () => (await model.invoke(QUESTION)).text;
  cases[`${name} stream`] = () => stream(model);
  cases[`${name} loop`] = () => loop(model);
  cases[`${name} cut`] = () => cut(new ChatOpenAI({ ...fields, ...more, configuration, maxTokens: 17 }));
  cases[`${name} named`] = () => named(model);
  for (const method of ["jsonSchema", "functionCalling", "jsonMode"])
    cases[`${name} ${method}`] = () => structured(model, PERSON, method);
  cases[`${name} functionCalling of a record`] = () => structured(model, withRecord, "functionCalling");
}
cases["chat jsonSchema of a record"] = async () =>
  typeof (await structured(new ChatOpenAI({ ...fields, configuration }), z.object({ fields: RECORD }), "jsonSchema")).fields;
await report(cases);
