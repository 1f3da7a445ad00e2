// What is sent for an answer.
import { dataUrl } from "../files/pictures";
import { t } from "../i18n";
import { pictureOf } from "../storage/store";
import { isPicture, type Attached, type Message, type Settings, type TextFile } from "../storage/types";
import { model } from "./state";

/** The text of a message with its files in front, each in a fence longer than any in it. */
function withFiles(content: string, files: TextFile[]): string {
  const parts = files.map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, content].filter(Boolean).join("\n\n");
}

type Part = { type: "text"; text: string } | { type: "image_url"; image_url: { url: string } };

/** A text; where there are pictures, parts in the order in which they were attached. */
async function contentOf(content: string, files: Attached[] = []): Promise<string | Part[]> {
  const parts: Part[] = [];
  let texts: TextFile[] = [];
  const addText = (said: string) => said && parts.push({ type: "text", text: said });
  for (const file of files) {
    if (!isPicture(file)) {
      texts.push(file);
      continue;
    }
    const blob = await pictureOf(file.picture);
    if (!blob) throw new Error(t("pictureGone", file.name));
    addText(withFiles("", texts));
    parts.push({ type: "image_url", image_url: { url: await dataUrl(blob) } });
    texts = [];
  }
  const last = withFiles(content, texts);
  if (!parts.length) return last;
  addText(last);
  return parts;
}

async function apiMessage(message: Message): Promise<object> {
  if (message.role === "tool") return { role: "tool", content: message.content, tool_call_id: message.callId };
  if (message.role === "user") return { role: "user", content: await contentOf(message.content, message.files) };
  if (!message.calls?.length) return { role: "assistant", content: message.content };
  return {
    role: "assistant",
    content: message.content,
    ...(message.reasoning && { reasoning_content: message.reasoning }),
    tool_calls: message.calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    })),
  };
}

const SAMPLING = [
  "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "max_tokens",
  "seed",
] as const; // prettier-ignore

/** The beginning of an answer that goes on. */
function begunMessage({ content, reasoning }: Message): object {
  return { role: "assistant", content, ...(reasoning && { reasoning_content: reasoning }) };
}

/** `begun`: the answer that goes on. Throws an Error where a picture is gone, or the tools are no JSON. */
export async function bodyOf(context: Message[], chosen: Settings, begun?: Message): Promise<object> {
  const body: Record<string, unknown> = { stream: true, stream_options: { include_usage: true }, return_speed: true };
  if (begun) body.continue_final_message = true;
  if (model.value) body.model = model.value.id;
  for (const name of SAMPLING) if (chosen[name] !== undefined) body[name] = chosen[name];
  if (chosen.stop?.length) body.stop = chosen.stop;
  if (chosen.thinking !== undefined) body.chat_template_kwargs = { enable_thinking: chosen.thinking };
  if (chosen.tools?.trim()) body.tools = JSON.parse(chosen.tools);
  if (chosen.dropsOldest) body.truncate_prompt_tokens = -1;
  const said = context.filter((one) => one.role !== "assistant" || one.content || one.calls?.length);
  body.messages = [
    ...(chosen.system ? [{ role: "system", content: chosen.system }] : []),
    ...(await Promise.all(said.map(apiMessage))),
    ...(begun ? [begunMessage(begun)] : []),
  ];
  return body;
}
