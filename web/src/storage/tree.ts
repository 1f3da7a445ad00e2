// A chat is a tree of messages: edits and retries are siblings. Pure functions over it.
import type { Chat, Message } from "./types";

export type Messages = ReadonlyMap<string, Message>;

/** The children of a message, oldest first; parent "" has the first messages. */
export function childrenOf(messages: Messages, parent: string): Message[] {
  const found = [...messages.values()].filter((message) => message.parent === parent);
  return found.sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1));
}

function byParent(messages: Messages): Map<string, Message[]> {
  const found = new Map<string, Message[]>();
  for (const message of messages.values()) {
    const siblings = found.get(message.parent);
    if (siblings) siblings.push(message);
    else found.set(message.parent, [message]);
  }
  return found;
}

/** The messages that are shown, from the first to the last: the selected child of each, else the newest. */
export function shownPath(messages: Messages, selected: Chat["selected"]): Message[] {
  const children = byParent(messages);
  const path: Message[] = [];
  let parent = "";
  for (;;) {
    const siblings = children.get(parent);
    if (!siblings) return path;
    const newest = siblings.reduce((a, b) => (b.created >= a.created ? b : a));
    const next = siblings.find((message) => message.id === selected[parent]) ?? newest;
    if (path.includes(next)) return path; // an imported file may hold a ring
    path.push(next);
    parent = next.id;
  }
}

/** The parent of the next message: the last one that is shown, but a message that was refused gets a sibling. */
export function nextParent(path: Message[]): string {
  return path.at(-1)?.isRefused ? (path.at(-2)?.parent ?? "") : (path.at(-1)?.id ?? "");
}

/** The messages from the first one down to this one. */
export function pathTo(messages: Messages, id: string): Message[] {
  const path: Message[] = [];
  for (let next = messages.get(id); next && !path.includes(next); next = messages.get(next.parent)) path.unshift(next);
  return path;
}
