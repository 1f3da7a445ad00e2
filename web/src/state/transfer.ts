// Chats as a JSON file, and back. A file may come from anybody: only what is understood is taken over.
import * as store from "../storage/store";
import { tellOthers } from "./others";
import { reloadChats } from "./state";
import { t } from "../i18n";
import type { Chat, Message, Settings, TextFile, ToolCall } from "../storage/types";

const FORMAT = "ktransformers-chats";

export async function exportChats(wanted: Chat[]): Promise<string> {
  const all = await Promise.all(
    wanted.map(async (chat) => ({ ...chat, messages: await store.messagesOf(chat.id) })),
  );
  return JSON.stringify({ format: FORMAT, version: 1, exported: new Date().toISOString(), chats: all }, null, 1);
}

export function download(name: string, text: string): void {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

type Fields = Record<string, unknown>;

const isFields = (value: unknown): value is Fields => typeof value === "object" && value !== null && !Array.isArray(value);
const text = (value: unknown): string => (typeof value === "string" ? value : "");
const number = (value: unknown): number => (typeof value === "number" && Number.isFinite(value) ? value : 0);
const list = (value: unknown): Fields[] => (Array.isArray(value) ? value.filter(isFields) : []);

function settingsOf(value: unknown): Settings {
  const taken: Fields = {};
  if (!isFields(value)) return {};
  for (const name of ["model", "system", "tools"]) if (typeof value[name] === "string") taken[name] = value[name];
  for (const name of [
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_tokens", "seed",
  ]) if (typeof value[name] === "number") taken[name] = value[name]; // prettier-ignore
  for (const name of ["thinking", "dropsOldest"]) if (typeof value[name] === "boolean") taken[name] = value[name];
  if (Array.isArray(value.stop)) taken.stop = value.stop.filter((one) => typeof one === "string");
  return taken as Settings;
}

function messageOf(from: Fields, chat: string, ids: Map<string, string>): Message {
  const role = from.role === "assistant" || from.role === "tool" ? from.role : "user";
  const made: Message = {
    id: ids.get(text(from.id))!,
    chat,
    parent: ids.get(text(from.parent)) ?? "",
    role,
    content: text(from.content),
    created: number(from.created),
  };
  const files = list(from.files).map((file): TextFile => ({
    name: text(file.name),
    text: text(file.text),
    ...(text(file.encoding) && { encoding: text(file.encoding) }),
    ...(number(file.pages) && { pages: number(file.pages) }),
  }));
  const calls = list(from.calls).map(
    (call): ToolCall => ({ id: text(call.id), name: text(call.name), arguments: text(call.arguments) }),
  );
  if (files.length) made.files = files;
  if (calls.length) made.calls = calls;
  if (text(from.reasoning)) made.reasoning = text(from.reasoning);
  if (number(from.reasoningSeconds)) made.reasoningSeconds = number(from.reasoningSeconds);
  if (text(from.callId)) made.callId = text(from.callId);
  if (text(from.model)) made.model = text(from.model);
  if (text(from.error)) made.error = text(from.error);
  if (text(from.errorCode)) made.errorCode = text(from.errorCode);
  if (number(from.dropped) > 0) made.dropped = number(from.dropped);
  if (role === "assistant") {
    const states = ["done", "length", "stopped", "error"] as const;
    made.state = states.find((state) => state === from.state) ?? "stopped";
  }
  if (isFields(from.usage)) {
    const { prompt, cached, completion, firstToken, decode } = from.usage;
    made.usage = {
      prompt: number(prompt), cached: number(cached), completion: number(completion), firstToken: number(firstToken),
      decode: number(decode), ...(from.usage.isRest === true && { isRest: true }),
    }; // prettier-ignore
  }
  return made;
}

/** Adds the chats of a file to those that are there, under new ids. Returns how many. Throws an Error that says why not. */
export async function importChats(json: string): Promise<number> {
  const file: unknown = JSON.parse(json);
  if (!isFields(file) || file.format !== FORMAT || file.version !== 1) throw new Error(t("notOurs"));
  const newChats: Chat[] = [];
  const newMessages: Message[] = [];
  for (const from of list(file.chats)) {
    const found = list(from.messages);
    const ids = new Map(found.map((message) => [text(message.id), store.newId()]));
    const id = store.newId();
    const selected = isFields(from.selected) ? Object.entries(from.selected) : [];
    newChats.push({
      id,
      title: text(from.title) || t("newChat"),
      created: number(from.created),
      updated: number(from.updated),
      settings: settingsOf(from.settings),
      selected: Object.fromEntries(
        selected.flatMap(([parent, child]) => {
          const to = ids.get(text(child));
          return to ? [[ids.get(parent) ?? "", to]] : [];
        }),
      ),
    });
    newMessages.push(...found.map((message) => messageOf(message, id, ids)));
  }
  await store.putAll(newChats, newMessages);
  await reloadChats();
  tellOthers();
  return newChats.length;
}
