// What every program here does: each case asks the server, one line of JSON says what all of them got.

import { z } from "zod";

export const QUESTION = "What is 17 + 25?";
export const WEATHER = "What is the weather in Paris?";
export const EXTRACT = "Extract name, age and city as JSON: Anna is 31 years old and lives in Paris.";
export const FORECAST = { temperature: 18, condition: "sunny" };

export const NAME = "get_weather";
export const DESCRIPTION = "Get the current weather of a city.";
// zod 4 writes records with `propertyNames`.
export const CITY = z.object({ city: z.string(), labels: z.record(z.string(), z.string()).optional() });
export const RECORD = z.record(z.string(), z.union([z.string(), z.number()]));
export const PERSON = z.object({ name: z.string(), age: z.number().int(), city: z.string() });

export async function report(cases) {
  const got = {};
  for (const [name, run] of Object.entries(cases)) {
    try {
      got[name] = { got: (await run()) ?? null };
    } catch (error) {
      got[name] = { error: String(error.stack ?? error).slice(-3000) };
    }
  }
  console.log(JSON.stringify(got));
}
