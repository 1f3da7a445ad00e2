// Chats, messages and their pictures in IndexedDB; what it refuses is held here until the page closes. Knows nothing of the page.
// Transactions run in the order in which these functions are called: nobody has to wait for a write before the next one.
import { openDB, type DBSchema, type IDBPDatabase } from "idb";
import { inBrowser } from "./remembered";
import { isPicture, type Chat, type Message } from "./types";

interface Schema extends DBSchema {
  chats: { key: string; value: Chat };
  messages: { key: string; value: Message; indexes: { chat: string } };
  pictures: { key: string; value: KeptPicture; indexes: { chat: string } };
}

/** Of a message of this chat, or of what is written for it; "" is the chat that is not there yet. */
export interface KeptPicture {
  id: string;
  chat: string;
  blob: Blob;
}

let database: Promise<IDBPDatabase<Schema>> | undefined;
/** The same once it is open, for the last moment of a page. */
let opened: IDBPDatabase<Schema> | undefined;

function closed(): void {
  database = opened = undefined;
}

async function openNow(): Promise<IDBPDatabase<Schema>> {
  opened = await openDB<Schema>("ktransformers", 2, {
    upgrade(made, version) {
      if (version < 1) {
        made.createObjectStore("chats", { keyPath: "id" });
        made.createObjectStore("messages", { keyPath: "id" }).createIndex("chat", "chat");
      }
      made.createObjectStore("pictures", { keyPath: "id" }).createIndex("chat", "chat");
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
const heldPictures = new Map<string, KeptPicture>();
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

/** Its pictures go with it, to a chat that was not there yet when they were attached. */
async function writeMessage(message: Message): Promise<void> {
  const transaction = (await db()).transaction(["chats", "messages", "pictures"], "readwrite");
  const put = async () => {
    if (await transaction.objectStore("chats").getKey(message.chat)) {
      await transaction.objectStore("messages").put(message);
      const pictures = transaction.objectStore("pictures");
      for (const id of picturesOf(message)) {
        const kept = await pictures.get(id);
        if (kept && kept.chat !== message.chat) await pictures.put({ ...kept, chat: message.chat });
      }
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

// Pictures.

const picturesOf = (message: Message): string[] => (message.files ?? []).filter(isPicture).map((one) => one.picture);

/** Keeps a picture for what is written in a chat that is still there, or not there yet (""). Returns its id. */
export async function putPicture(chat: string, blob: Blob): Promise<string> {
  const picture = { id: newId(), chat, blob };
  const hold = () => void heldPictures.set(picture.id, picture);
  const write = async () => {
    const transaction = (await db()).transaction(["chats", "pictures"], "readwrite");
    const put = async () => {
      const isThere = !chat || (await transaction.objectStore("chats").getKey(chat));
      if (isThere) await transaction.objectStore("pictures").put(picture);
      else if (heldChats.has(chat)) hold();
    };
    await Promise.all([put(), transaction.done]);
  };
  await attempt(write, hold);
  return picture.id;
}

export async function pictureOf(id: string): Promise<Blob | undefined> {
  const read = async () => (await (await db()).get("pictures", id))?.blob;
  return heldPictures.get(id)?.blob ?? attempt(read, () => undefined);
}

/** Deletes a picture that was attached and is no more, but where a message has it: an edit, or a refusal, shares it. */
export async function dropPicture(chat: string, id: string): Promise<void> {
  const has = (message: Message) => picturesOf(message).includes(id);
  if (![...heldMessages.values()].some(has)) heldPictures.delete(id);
  const write = async () => {
    const transaction = (await db()).transaction(["messages", "pictures"], "readwrite");
    const remove = async () => {
      const found = await transaction.objectStore("messages").index("chat").getAll(chat);
      if (!found.some(has)) await transaction.objectStore("pictures").delete(id);
    };
    await Promise.all([remove(), transaction.done]);
  };
  await attempt(write, () => undefined);
}

const SWEEP_AFTER = 7 * 86_400_000; // ms; another tab may still have what this one does not know of

/** Deletes what was attached for a new chat, but for these, and was neither sent nor kept. */
export async function sweepPictures(kept: string[]): Promise<void> {
  const before = (Date.now() - SWEEP_AFTER).toString(36); // as ids begin
  const write = async () => {
    const transaction = (await db()).transaction("pictures", "readwrite");
    const remove = async () => {
      const ids = await transaction.store.index("chat").getAllKeys("");
      await Promise.all(ids.filter((id) => id < before && !kept.includes(id)).map((id) => transaction.store.delete(id)));
    };
    await Promise.all([remove(), transaction.done]);
  };
  await attempt(write, () => undefined);
}

export async function putAll(chats: Chat[], messages: Message[], pictures: KeptPicture[]): Promise<void> {
  const write = async () => {
    const transaction = (await db()).transaction(["chats", "messages", "pictures"], "readwrite");
    const puts = [
      ...chats.map((chat) => transaction.objectStore("chats").put(chat)),
      ...messages.map((message) => transaction.objectStore("messages").put(message)),
      ...pictures.map((picture) => transaction.objectStore("pictures").put(picture)),
    ];
    await Promise.all([...puts, transaction.done]);
  };
  await attempt(write, () => {
    for (const chat of chats) heldChats.set(chat.id, chat);
    for (const message of messages) heldMessages.set(message.id, message);
    for (const picture of pictures) heldPictures.set(picture.id, picture);
  });
}

export async function deleteChat(id: string): Promise<void> {
  heldChats.delete(id);
  for (const held of [heldMessages, heldPictures]) for (const one of held.values()) if (one.chat === id) held.delete(one.id);
  const write = async () => {
    const transaction = (await db()).transaction(["chats", "messages", "pictures"], "readwrite");
    const remove = async () => {
      await transaction.objectStore("chats").delete(id);
      for (const name of ["messages", "pictures"] as const) {
        const of = transaction.objectStore(name);
        const keys = await of.index("chat").getAllKeys(id);
        await Promise.all(keys.map((key) => of.delete(key)));
      }
    };
    await Promise.all([remove(), transaction.done]);
  };
  await attempt(write, () => undefined);
}

/** But the pictures of a chat that is not there yet. */
export async function deleteEverything(): Promise<void> {
  heldChats.clear();
  heldMessages.clear();
  for (const { id, chat } of heldPictures.values()) if (chat) heldPictures.delete(id);
  const write = async () => {
    const transaction = (await db()).transaction(["chats", "messages", "pictures"], "readwrite");
    const pictures = transaction.objectStore("pictures");
    const remove = async () => {
      const keys = await pictures.index("chat").getAllKeys(IDBKeyRange.lowerBound("", true));
      await Promise.all(keys.map((key) => pictures.delete(key)));
    };
    const clears = [transaction.objectStore("chats").clear(), transaction.objectStore("messages").clear(), remove()];
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
