// Chats and messages in IndexedDB; what it refuses is held here until the page closes. Knows nothing of the page.
// Transactions run in the order in which these functions are called: nobody has to wait for a write before the next one.
import { openDB, type DBSchema, type IDBPDatabase } from "idb";
import { inBrowser } from "./remembered";
import type { Chat, Message } from "./types";

interface Schema extends DBSchema {
  chats: { key: string; value: Chat };
  messages: { key: string; value: Message; indexes: { chat: string } };
}

let database: Promise<IDBPDatabase<Schema>> | undefined;
/** The same once it is open, for the last moment of a page. */
let opened: IDBPDatabase<Schema> | undefined;

function closed(): void {
  database = opened = undefined;
}

async function openNow(): Promise<IDBPDatabase<Schema>> {
  opened = await openDB<Schema>("ktransformers", 1, {
    upgrade(made) {
      made.createObjectStore("chats", { keyPath: "id" });
      made.createObjectStore("messages", { keyPath: "id" }).createIndex("chat", "chat");
    },
    blocking(_from, _to, event) {
      (event.target as IDBDatabase).close();
      closed();
    },
    terminated: closed,
  });
  return opened;
}

function db(): Promise<IDBPDatabase<Schema>> {
  database ??= openNow();
  database.catch(closed);
  return database;
}

const heldChats = new Map<string, Chat>();
const heldMessages = new Map<string, Message>();
let tell: (error: unknown) => void = () => undefined;

/** Who hears that the browser refuses. */
export function onRefusal(listener: (error: unknown) => void): void {
  tell = listener;
}

/** Runs what reads or writes; where the browser refuses, says so and goes on with `otherwise`. */
async function attempt<T>(work: () => Promise<T>, otherwise: (error: unknown) => T): Promise<T> {
  try {
    return await work();
  } catch (error) {
    tell(error);
    return otherwise(error);
  }
}

/** Unique, and in the order of making within a millisecond's precision. crypto.randomUUID needs TLS or loopback. */
export function newId(): string {
  const random = crypto.getRandomValues(new Uint32Array(3));
  return Date.now().toString(36) + [...random].map((word) => word.toString(36).padStart(7, "0")).join("");
}

/** Of `selected` only what is new: other tabs may have changed the rest. */
export type ChatChange = Partial<Omit<Chat, "id">>;

export function changed(chat: Chat, change: ChatChange): Chat {
  return { ...chat, ...change, selected: { ...chat.selected, ...change.selected } };
}

function merged<T extends { id: string }>(found: T[], held: Iterable<T>): T[] {
  return [...new Map([...found, ...held].map((one) => [one.id, one])).values()];
}

export async function allChats(): Promise<Chat[]> {
  const found = await attempt(async () => (await db()).getAll("chats"), () => []);
  return merged(found, heldChats.values()).sort((a, b) => b.updated - a.updated);
}

export async function messagesOf(chat: string): Promise<Message[]> {
  const found = await attempt(async () => (await db()).getAllFromIndex("messages", "chat", chat), () => []);
  return merged(found, [...heldMessages.values()].filter((one) => one.chat === chat));
}

// What is shown before it is in the store. A browser drops the transactions of a page that is left, those that wait for
// others too: what is still under way then goes into the small memory of remembered.ts, which is written at once, and
// another page, mostly the same one loaded again, takes it up.

/** In the order in which it is written. */
interface Left {
  chats: Chat[];
  changes: { now: Chat; change: ChatChange }[];
  messages: Message[];
}

const LEFT = "ktransformers.left.";
const underWay = new Set<Partial<Left>>();

/** Runs what writes, which counts as under way until it is done or refused. */
async function attemptWrite(what: Partial<Left>, write: () => Promise<void>, otherwise: () => void): Promise<void> {
  underWay.add(what);
  await attempt(write, otherwise);
  underWay.delete(what);
}

/** For the last moment of a page, after which nothing is heard of: keeps what is under way, and these messages. */
export function leave(last: Message[]): void {
  const writes = [...underWay, { messages: last }];
  const messages = new Map(writes.flatMap((one) => one.messages ?? []).map((one) => [one.id, one])); // the newest of each
  const left: Left = {
    chats: writes.flatMap((one) => one.chats ?? []),
    changes: writes.flatMap((one) => one.changes ?? []),
    messages: [...messages.values()],
  };
  if (!left.chats.length && !left.changes.length && !messages.size) return;
  putNow(last); // enough where nothing else is under way, and all there is where the memory refuses
  inBrowser.set(LEFT + newId(), JSON.stringify(left));
}

/** Calls back when another tab is left with something under way. */
export function onLeft(listener: () => void): void {
  addEventListener("storage", ({ key, newValue }) => key?.startsWith(LEFT) && newValue && listener());
}

/** Puts into the store what pages that were left could not. */
export async function takeUp(): Promise<void> {
  for (const name of inBrowser.names(LEFT)) {
    const write = async () => {
      const left = JSON.parse(inBrowser.get(name) ?? "{}") as Partial<Left>; // {}: another tab was faster
      const writes = [
        ...(left.chats ?? []).map(writeChat),
        ...(left.changes ?? []).map(({ now, change }) => writeChange(now, change)),
        ...(left.messages ?? []).map(writeMessage),
      ];
      await Promise.all(writes);
      inBrowser.forget(name);
    };
    await attempt(write, () => undefined);
  }
}

async function writeChat(chat: Chat): Promise<void> {
  await (await db()).put("chats", chat);
}

export async function putChat(chat: Chat): Promise<void> {
  await attemptWrite({ chats: [chat] }, () => writeChat(chat), () => void heldChats.set(chat.id, chat));
}

async function writeChange(now: Chat, change: ChatChange): Promise<void> {
  const transaction = (await db()).transaction("chats", "readwrite");
  const put = async () => {
    const kept = await transaction.store.get(now.id);
    if (kept) await transaction.store.put(changed(kept, change));
    else if (heldChats.has(now.id)) heldChats.set(now.id, now);
  };
  await Promise.all([put(), transaction.done]);
}

/** Changes a chat that is still there: it may have been deleted in between, in another tab too. now: as this tab has it. */
export async function changeChat(now: Chat, change: ChatChange): Promise<void> {
  const refused = () => void heldChats.set(now.id, now);
  await attemptWrite({ changes: [{ now, change }] }, () => writeChange(now, change), refused);
}

async function writeMessage(message: Message): Promise<void> {
  const transaction = (await db()).transaction(["chats", "messages"], "readwrite");
  const put = async () => {
    if (await transaction.objectStore("chats").getKey(message.chat)) {
      await transaction.objectStore("messages").put(message);
      heldMessages.delete(message.id);
    } else if (heldChats.has(message.chat)) heldMessages.set(message.id, message);
  };
  await Promise.all([put(), transaction.done]);
}

/** Puts it where its chat still is: an answer may end after its chat was deleted. */
export async function putMessage(message: Message): Promise<void> {
  const refused = () => void heldMessages.set(message.id, message);
  await attemptWrite({ messages: [message] }, () => writeMessage(message), refused);
}

/** Begins and commits without waiting. */
function putNow(messages: Message[]): void {
  if (!opened || !messages.length) return;
  const transaction = opened.transaction("messages", "readwrite");
  transaction.done.catch(tell);
  for (const message of messages) transaction.store.put(message).catch(tell);
  transaction.commit();
}

export async function putAll(chats: Chat[], messages: Message[]): Promise<void> {
  const write = async () => {
    const transaction = (await db()).transaction(["chats", "messages"], "readwrite");
    const puts = [
      ...chats.map((chat) => transaction.objectStore("chats").put(chat)),
      ...messages.map((message) => transaction.objectStore("messages").put(message)),
    ];
    await Promise.all([...puts, transaction.done]);
  };
  await attempt(write, () => {
    for (const chat of chats) heldChats.set(chat.id, chat);
    for (const message of messages) heldMessages.set(message.id, message);
  });
}

export async function deleteChat(id: string): Promise<void> {
  heldChats.delete(id);
  for (const message of heldMessages.values()) if (message.chat === id) heldMessages.delete(message.id);
  const write = async () => {
    const transaction = (await db()).transaction(["chats", "messages"], "readwrite");
    const remove = async () => {
      await transaction.objectStore("chats").delete(id);
      const messages = transaction.objectStore("messages");
      const keys = await messages.index("chat").getAllKeys(id);
      await Promise.all(keys.map((key) => messages.delete(key)));
    };
    await Promise.all([remove(), transaction.done]);
  };
  await attempt(write, () => undefined);
}

export async function deleteEverything(): Promise<void> {
  heldChats.clear();
  heldMessages.clear();
  const write = async () => {
    const transaction = (await db()).transaction(["chats", "messages"], "readwrite");
    const clears = [transaction.objectStore("chats").clear(), transaction.objectStore("messages").clear()];
    await Promise.all([...clears, transaction.done]);
  };
  await attempt(write, () => undefined);
}

export interface Match {
  message: string;
  /** The words around it. */
  excerpt: string;
}

/** For each chat that has one, the first message where the text stands. */
export async function search(text: string): Promise<Map<string, Match>> {
  const wanted = text.toLowerCase();
  const found = new Map<string, Match>();
  const look = ({ id, chat, content }: Message) => {
    const at = found.has(chat) ? -1 : content.toLowerCase().indexOf(wanted);
    if (at < 0) return;
    found.set(chat, { message: id, excerpt: content.slice(Math.max(at - 24, 0), at + wanted.length + 60).replace(/\s+/g, " ") });
  };
  heldMessages.forEach(look);
  const read = async () => {
    const store = (await db()).transaction("messages").store;
    for (let cursor = await store.openCursor(); cursor; cursor = await cursor.continue()) look(cursor.value);
  };
  await attempt(read, () => undefined);
  return found;
}
