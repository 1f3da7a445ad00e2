// What is written and not sent yet, for each chat; kept over a reload. "" stands for the chat that is not there yet.
import { signal, type Signal } from "@preact/signals";
import { inBrowser } from "./remembered";
import { dropPicture } from "./store";
import { isPicture, type Attached } from "./types";

export interface Draft {
  readonly chat: string;
  readonly text: Signal<string>;
  readonly files: Signal<Attached[]>;
  /** Files that are being read. */
  readonly numReading: Signal<number>;
}

const TEXT = "ktransformers.draft.";
const FILES = "ktransformers.draftfiles.";
/** Characters. The browser gives this small memory some millions, and store.ts needs room in it too. */
const MAX_KEPT = 500_000;
const KEEP_AFTER = 300; // ms; a long text is not written at each key

const drafts = new Map<string, Draft>();
const unkept = new Set<Draft>();
let timer = 0;

function keptFiles(chat: string): Attached[] {
  try {
    return JSON.parse(inBrowser.get(FILES + chat) ?? "[]") as Attached[];
  } catch {
    return [];
  }
}

export function draftOf(chat: string): Draft {
  let draft = drafts.get(chat);
  if (!draft) {
    draft = { chat, text: signal(inBrowser.get(TEXT + chat) ?? ""), files: signal(keptFiles(chat)), numReading: signal(0) };
    drafts.set(chat, draft);
  }
  return draft;
}

/** Larger ones stay until the page closes. */
function keep(name: string, text: string): void {
  if (text && text.length <= MAX_KEPT) inBrowser.set(name, text);
  else inBrowser.forget(name);
}

function keepAll(): void {
  clearTimeout(timer);
  timer = 0;
  for (const { chat, text } of unkept) keep(TEXT + chat, text.peek());
  unkept.clear();
}

addEventListener("pagehide", keepAll);

export function setText(draft: Draft, text: string): void {
  draft.text.value = text;
  unkept.add(draft);
  if (!text) keepAll();
  else timer ||= window.setTimeout(keepAll, KEEP_AFTER);
}

export function setFiles(draft: Draft, files: Attached[]): void {
  draft.files.value = files;
  keep(FILES + draft.chat, files.length ? JSON.stringify(files) : "");
}

export function removeFile(draft: Draft, index: number): void {
  const [gone] = draft.files.peek().slice(index);
  setFiles(draft, draft.files.peek().filter((_, i) => i !== index));
  if (gone && isPicture(gone)) void dropPicture(draft.chat, gone.picture);
}

/** With the chat. */
export function forgetDraft(chat: string): void {
  const draft = draftOf(chat);
  setText(draft, "");
  setFiles(draft, []);
  drafts.delete(chat);
}

/** With all chats; what is written for a new one stays. */
export function forgetDrafts(): void {
  const names = [TEXT, FILES].flatMap((prefix) => inBrowser.names(prefix).map((name) => name.slice(prefix.length)));
  for (const chat of new Set([...names, ...drafts.keys()])) if (chat) forgetDraft(chat);
}
