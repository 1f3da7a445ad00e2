// What the page shows, as signals, and what changes it. Answers on their way are in answer.ts.
import { batch, computed, effect, signal } from "@preact/signals";
import * as store from "../storage/store";
import { ApiError, getModels, getReady, type Model } from "../api";
import { draftOf, forgetDraft, forgetDrafts } from "../storage/drafts";
import { language, t, type Language } from "../i18n";
import { listen, tellOthers } from "./others";
import { inBrowser } from "../storage/remembered";
import { shownPath, type Messages } from "../storage/tree";
import { isPicture, type Chat, type Message, type Settings } from "../storage/types";

export type View = { name: "chat"; id: string } | { name: "new" } | { name: "status" };
export type Theme = "auto" | "light" | "dark";

const DEFAULTS = "ktransformers.defaults";

export const chats = signal<Chat[]>([]);
/** Of the chat that is shown. */
export const messages = signal<Messages>(new Map());
export const view = signal<View>({ name: "new" });
export const models = signal<Model[]>([]);
/** What keeps requests waiting: a text to show, "" when nothing does. */
export const obstacle = signal("");
export const isKeyWanted = signal<"" | "needed" | "wrong">("");
export const notice = signal("");
/** Where the page is narrow the list of chats lies over it. */
export const isSidebarOpen = signal(false);
export const shownDialog = signal<"" | "settings" | "preferences">("");
export const theme = signal<Theme>((inBrowser.get("ktransformers.theme") as Theme | undefined) ?? "auto");
/** Of the chat that is not there yet. */
export const draftSettings = signal<Settings>(defaults());

export const chat = computed(() => {
  const now = view.value;
  return now.name === "chat" ? chats.value.find((one) => one.id === now.id) : undefined;
});
export const path = computed(() => (chat.value ? shownPath(messages.value, chat.value.selected) : []));
export const settings = computed(() => chat.value?.settings ?? draftSettings.value);
export const model = computed(() => {
  const wanted = settings.value.model;
  return models.value.find((one) => one.id === wanted) ?? models.value[0];
});
export const readsPictures = computed(() => model.value?.architecture?.input_modalities?.includes("image") ?? false);

export function defaults(): Settings {
  try {
    return JSON.parse(inBrowser.get(DEFAULTS) ?? "{}") as Settings;
  } catch {
    return {};
  }
}

export function keepDefaults(kept: Settings): void {
  inBrowser.set(DEFAULTS, JSON.stringify(kept));
}

effect(() => {
  document.documentElement.dataset.theme = theme.value;
  inBrowser.set("ktransformers.theme", theme.value);
});
effect(() => {
  document.documentElement.lang = language.value === "zh" ? "zh-CN" : "en";
});
effect(() => {
  const what = view.value.name === "status" ? t("status") : chat.value?.title;
  document.title = what ? `${what} · ktransformers` : "ktransformers";
});

export function setLanguage(next: Language): void {
  inBrowser.set("ktransformers.language", next);
  language.value = next;
}

/** Counts what this tab changes: what was read before a change must not be shown after it. */
let numChanges = 0;

async function readUnchanged<T>(read: () => Promise<T>): Promise<T> {
  for (;;) {
    const before = numChanges;
    const found = await read();
    if (before === numChanges) return found;
  }
}

const byId = (found: Message[]): Messages => new Map(found.map((message) => [message.id, message]));

/** Shows what the store has: another tab, or an import, has changed it. */
export async function reloadChats(): Promise<void> {
  const shown = view.value.name === "chat" ? view.value.id : "";
  const read = () => Promise.all([store.allChats(), shown ? store.messagesOf(shown) : []]);
  await store.takeUp();
  const [foundChats, found] = await readUnchanged(read);
  batch(() => {
    chats.value = foundChats;
    if (view.value.name !== "chat" || view.value.id !== shown) return; // what is shown now was read later
    if (chat.value) messages.value = byId(found);
    else open({ name: "new" });
  });
}

let isRefusalTold = false;
store.onRefusal((error) => {
  if (!isRefusalTold) notice.value = t("storageFailed", error instanceof Error ? error.message : String(error));
  isRefusalTold = true;
});

// Which view: the part of the address after #.

function viewOf(hash: string): View {
  const [, name, id] = hash.replace(/^#/, "").split("/");
  if (name === "status") return { name };
  return name === "chat" && id ? { name, id } : { name: "new" };
}

export function open(next: View): void {
  location.hash = next.name === "chat" ? `#/chat/${next.id}` : next.name === "status" ? "#/status" : "#/";
}

async function show(next: View): Promise<void> {
  if (next.name === "chat") {
    if (!chats.value.some((one) => one.id === next.id)) return open({ name: "new" });
    if (chat.value?.id !== next.id) {
      const found = await readUnchanged(() => store.messagesOf(next.id));
      if (location.hash !== `#/chat/${next.id}`) return;
      batch(() => {
        messages.value = byId(found);
        view.value = next;
      });
    }
  } else if (next.name === "new" && view.value.name !== "new") draftSettings.value = defaults();
  view.value = next;
}

/** Takes up what this browser keeps, then what the server says. */
export async function start(): Promise<void> {
  await store.takeUp();
  chats.value = await readUnchanged(store.allChats); // somebody may have sent a message by now
  listen(() => void reloadChats());
  store.onLeft(() => void reloadChats());
  window.addEventListener("hashchange", () => void show(viewOf(location.hash)));
  await show(viewOf(location.hash));
  void store.sweepPictures(draftOf("").files.peek().filter(isPicture).map((one) => one.picture));
  await connect();
}

export function openSidebar(): void {
  isSidebarOpen.value = matchMedia("(max-width: 50rem)").matches;
}

// The server.

let timer = 0;

/** Asks for the models until they come. */
export async function connect(hasNewKey = false): Promise<void> {
  clearTimeout(timer);
  try {
    models.value = await getModels();
    await getReady();
    if (obstacle.value) models.value = await getModels(); // what a model reads is known once it is loaded
    obstacle.value = "";
    if (isKeyWanted.value) isKeyWanted.value = "";
  } catch (error) {
    await explain(error, hasNewKey);
  }
}

/** Shows what is in the way, and keeps asking until it is not. */
export async function explain(error: unknown, hasNewKey = false): Promise<void> {
  clearTimeout(timer);
  if (!(error instanceof ApiError)) throw error;
  if (error.status === 401) {
    if (hasNewKey) isKeyWanted.value = "wrong";
    else isKeyWanted.value ||= "needed";
    return;
  }
  obstacle.value = error.status === 0 ? t("unreachable") : error.code === "not_ready" ? await progress(error) : error.message;
  timer = window.setTimeout(() => void connect(), 1500);
}

async function progress(error: ApiError): Promise<string> {
  try {
    await getReady();
    return error.message;
  } catch (reason) {
    return reason instanceof ApiError && reason.message ? reason.message : t("loading");
  }
}

// Chats.

/** In `change.selected` is only what is new of it. */
export async function changeChat(id: string, change: store.ChatChange): Promise<void> {
  const old = chats.value.find((one) => one.id === id);
  if (!old) return;
  numChanges += 1;
  const next = store.changed(old, change);
  chats.value = chats.value.map((one) => (one.id === id ? next : one)).sort((a, b) => b.updated - a.updated);
  await store.changeChat(next, change);
  tellOthers();
}

export function changeSettings(next: Settings): void {
  if (chat.value) void changeChat(chat.value.id, { settings: next });
  else draftSettings.value = next;
}

export function select(message: Message): void {
  if (chat.value) void changeChat(chat.value.id, { selected: { [message.parent]: message.id } });
}

/** The chat that is shown; a new one where none is. */
export function ensureChat(title: string): Chat {
  if (chat.value) return chat.value;
  numChanges += 1;
  const now = Date.now();
  const made: Chat = { id: store.newId(), title, created: now, updated: now, settings: draftSettings.value, selected: {} };
  batch(() => {
    chats.value = [made, ...chats.value];
    messages.value = new Map();
    view.value = { name: "chat", id: made.id };
  });
  void store.putChat(made);
  open(view.value);
  return made;
}

/** Puts a message where its chat is: on the screen if that shows it, and into the store. */
export async function putMessage(message: Message): Promise<void> {
  numChanges += 1;
  if (chat.value?.id === message.chat) messages.value = new Map(messages.value).set(message.id, message);
  await store.putMessage(message);
}

/** A chat leaves the list when it has left the store: what is not seen any more does not come back with the next load. */
export async function removeChat(id: string): Promise<void> {
  await store.deleteChat(id);
  numChanges += 1;
  forgetDraft(id);
  chats.value = chats.value.filter((one) => one.id !== id);
  if (view.value.name === "chat" && view.value.id === id) open({ name: "new" });
  tellOthers();
}

export async function removeAll(): Promise<void> {
  await store.deleteEverything();
  numChanges += 1;
  forgetDrafts();
  chats.value = [];
  open({ name: "new" });
  tellOthers();
}
