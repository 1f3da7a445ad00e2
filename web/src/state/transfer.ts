// Chats as a JSON file, and back. A file may come from anybody: only what is understood is taken over.
import { dataUrl, fromDataUrl } from "../files/pictures";
import * as store from "../storage/store";
import { tellOthers } from "./others";
import { reloadChats } from "./state";
import { t } from "../i18n";
import { isPicture, type Attached, type Chat, type Message, type PictureFacts, type Settings, type ToolCall } from "../storage/types";

const FORMAT = "ktransformers-chats";

/** By id, as data URLs. A picture that is gone is left out, as it is in its chat. */
async function picturesOf(messages: Message[]): Promise<Record<string, string>> {
  const ids = new Set(messages.flatMap((message) => message.files ?? []).filter(isPicture).map((one) => one.picture));
  const found: Record<string, string> = {};
  for (const id of ids) {
    const blob = await store.pictureOf(id);
    if (blob) found[id] = await dataUrl(blob);
  }
  return found;
}

/** A file of JSON, in pieces: all chats with their pictures may be longer than a text can be. */
export async function exportChats(wanted: Chat[]): Promise<Blob> {
  const head = { format: FORMAT, version: 1, exported: new Date().toISOString() };
  const pieces = [JSON.stringify(head).slice(0, -1), ',"chats":['];
  for (const [index, chat] of wanted.entries()) {
    const messages = await store.messagesOf(chat.id);
    pieces.push(index ? ",\n" : "\n", JSON.stringify({ ...chat, messages, pictures: await picturesOf(messages) }, null, 1));
  }
  return new Blob([...pieces, "]}\n"], { type: "application/json" });
}

export function download(name: string, file: Blob): void {
  const url = URL.createObjectURL(file);
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

function factsOf(from: Fields): PictureFacts {
  return { type: text(from.type), width: number(from.width), height: number(from.height), size: number(from.size) };
}

/** ids: new ones of pictures, by those of the file. One that the file does not hold stays missing. */
function attachedOf(from: Fields, ids: Map<string, string>): Attached {
  const name = text(from.name);
  if (!text(from.picture)) {
    const [encoding, pages] = [text(from.encoding), number(from.pages)];
    return { name, text: text(from.text), ...(encoding && { encoding }), ...(pages && { pages }) };
  }
  const picture = ids.get(text(from.picture)) ?? store.newId();
  return { picture, name, ...factsOf(from), ...(isFields(from.from) && { from: factsOf(from.from) }) };
}

function messageOf(from: Fields, chat: string, ids: Map<string, string>, pictureIds: Map<string, string>): Message {
  const role = from.role === "assistant" || from.role === "tool" ? from.role : "user";
  const made: Message = {
    id: ids.get(text(from.id))!,
    chat,
    parent: ids.get(text(from.parent)) ?? "",
    role,
    content: text(from.content),
    created: number(from.created),
  };
  const files = list(from.files).map((file) => attachedOf(file, pictureIds));
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
  if (from.isRefused === true) made.isRefused = true;
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
  const newPictures: store.KeptPicture[] = [];
  for (const from of list(file.chats)) {
    const found = list(from.messages);
    const ids = new Map(found.map((message) => [text(message.id), store.newId()]));
    const id = store.newId();
    const pictureIds = new Map<string, string>();
    for (const [name, url] of isFields(from.pictures) ? Object.entries(from.pictures) : []) {
      const blob = fromDataUrl(text(url));
      if (!blob) continue;
      const picture = store.newId();
      pictureIds.set(name, picture);
      newPictures.push({ id: picture, chat: id, blob });
    }
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
    newMessages.push(...found.map((message) => messageOf(message, id, ids, pictureIds)));
  }
  await store.putAll(newChats, newMessages, newPictures);
  await reloadChats();
  tellOthers();
  return newChats.length;
}
