// OpenAI's SDK: runTools and parse() with schemas of zod, over chat completions and responses.

import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { DESCRIPTION, EXTRACT, FORECAST, NAME, PERSON, QUESTION, WEATHER, report } from "./cases.mjs";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const user = (content) => ({ model: "demo", temperature: 0, messages: [{ role: "user", content }] });
const asked = [];
const weather = zodFunction({
  name: NAME,
  description: DESCRIPTION,
  parameters: z.object({ city: z.string() }),
  function: (input) => {
    asked.push(input);
    return FORECAST;
  },
});

async function runTools(more) {
  asked.length = 0;
  const said = await client.chat.completions.runTools({ ...user(WEATHER), tools: [weather], ...more }).finalContent();
  return [...asked, said];
}

async function chatParse() {
  const format = zodResponseFormat(PERSON, "person");
  return (await client.chat.completions.parse({ ...user(EXTRACT), response_format: format })).choices[0].message.parsed;
}

async function responsesParse() {
  const text = { format: zodTextFormat(PERSON, "person") };
  return (await client.responses.parse({ model: "demo", temperature: 0, input: EXTRACT, text })).output_parsed;
}

await report({
  text: async () => (await client.chat.completions.create(user(QUESTION))).choices[0].message.content,
  responses: async () => (await client.responses.create({ model: "demo", temperature: 0, input: QUESTION })).output_text,
  "run tools": () => runTools({}),
  "streamed run tools": () => runTools({ stream: true }),
  "chat parse": chatParse,
  "responses parse": responsesParse,
});
