// Chats and messages in IndexedDB. Knows nothing of the page.
import { openDB, type DBSchema, type IDBPDatabase } from "idb";
import type { Chat, Message } from "./types";

interface Schema extends DBSchema {
  chats: { key: string; value: Chat };
  messages: { key: string; value: Message; indexes: { chat: string } };
}

let database: Promise<IDBPDatabase<Schema>> | undefined;

function db(): Promise<IDBPDatabase<Schema>> {
  database ??= openDB<Schema>("ktransformers", 1, {
    upgrade(made) {
      made.createObjectStore("chats", { keyPath: "id" });
      made.createObjectStore("messages", { keyPath: "id" }).createIndex("chat", "chat");
    },
    blocking: (_from, _to, event) => (event.target as IDBDatabase).close(),
  });
  return database;
}

/** Unique, and in the order of making within a millisecond's precision. crypto.randomUUID needs TLS or loopback. */
export function newId(): string {
  const random = crypto.getRandomValues(new Uint32Array(3));
  return Date.now().toString(36) + [...random].map((word) => word.toString(36).padStart(7, "0")).join("");
}

export async function allChats(): Promise<Chat[]> {
  return (await (await db()).getAll("chats")).sort((a, b) => b.updated - a.updated);
}

export async function messagesOf(chat: string): Promise<Message[]> {
  return (await db()).getAllFromIndex("messages", "chat", chat);
}

export async function putChat(chat: Chat): Promise<void> {
  await (await db()).put("chats", chat);
}

/** Puts what became of a chat that is still there: it may have been deleted in between, in another tab too. */
export async function changeChat(chat: Chat): Promise<void> {
  const transaction = (await db()).transaction("chats", "readwrite");
  if (await transaction.store.getKey(chat.id)) await transaction.store.put(chat);
  await transaction.done;
}

/** Puts it where its chat still is: an answer may end after its chat was deleted. */
export async function putMessage(message: Message): Promise<void> {
  const transaction = (await db()).transaction(["chats", "messages"], "readwrite");
  if (await transaction.objectStore("chats").getKey(message.chat)) await transaction.objectStore("messages").put(message);
  await transaction.done;
}

export async function putAll(chats: Chat[], messages: Message[]): Promise<void> {
  const transaction = (await db()).transaction(["chats", "messages"], "readwrite");
  for (const chat of chats) void transaction.objectStore("chats").put(chat);
  for (const message of messages) void transaction.objectStore("messages").put(message);
  await transaction.done;
}

export async function deleteChat(id: string): Promise<void> {
  const transaction = (await db()).transaction(["chats", "messages"], "readwrite");
  await transaction.objectStore("chats").delete(id);
  const messages = transaction.objectStore("messages");
  for (const key of await messages.index("chat").getAllKeys(id)) void messages.delete(key);
  await transaction.done;
}

export async function deleteEverything(): Promise<void> {
  const transaction = (await db()).transaction(["chats", "messages"], "readwrite");
  await Promise.all([transaction.objectStore("chats").clear(), transaction.objectStore("messages").clear()]);
  await transaction.done;
}

/** For each chat that has one, an excerpt around the first place where the text stands. */
export async function search(text: string): Promise<Map<string, string>> {
  const wanted = text.toLowerCase();
  const found = new Map<string, string>();
  const store = (await db()).transaction("messages").store;
  for (let cursor = await store.openCursor(); cursor; cursor = await cursor.continue()) {
    const { chat, content } = cursor.value;
    const at = found.has(chat) ? -1 : content.toLowerCase().indexOf(wanted);
    if (at >= 0) found.set(chat, content.slice(Math.max(at - 24, 0), at + wanted.length + 60).replace(/\s+/g, " "));
  }
  return found;
}
