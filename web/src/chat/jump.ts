// From a match in the list of chats to the place where it stands: its branch, its message, its words.
import { signal } from "@preact/signals";
import { changeChat, chat, messages, path } from "../state/state";
import { pathTo } from "../storage/tree";
import type { Message } from "../storage/types";

export interface Jump {
  chat: string;
  /** A message that has the text; one in the shown branch goes first. */
  message: string;
  text: string;
}

/** Where a search leads; undefined: nobody searches. */
export const jump = signal<Jump | undefined>(undefined);

const HIGHLIGHT = "found"; // its colours are in message.css
const MAX_RANGES = 1000;
const ACTS = ["wheel", "touchstart", "pointerdown", "keydown"] as const;

function has(message: Message, text: string): boolean {
  return message.content.toLowerCase().includes(text);
}

/** The message to go to, shown; undefined while its branch is being selected, or where it is gone. */
function shownTarget({ message, text }: Jump): Message | undefined {
  const wanted = text.toLowerCase();
  const shown = path.value.find((one) => one.id === message) ?? path.value.find((one) => has(one, wanted));
  if (shown) return shown;
  const way = pathTo(messages.value, message);
  if (way.length && chat.value) {
    void changeChat(chat.value.id, { selected: Object.fromEntries(way.map((one) => [one.parent, one.id])) });
  }
  return undefined;
}

/** Where the text stands in an element, also across its parts. */
export function rangesOf(element: Element, text: string): Range[] {
  const nodes: { node: Text; from: number }[] = [];
  let all = "";
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    nodes.push({ node: node as Text, from: all.length });
    all += (node as Text).data;
  }
  const lower = all.toLowerCase();
  if (lower.length !== all.length) return []; // letters whose small form is longer: places would be wrong
  const wanted = text.toLowerCase();
  const place = (at: number): [Text, number] => {
    const found = nodes.findLast((one) => one.from <= at)!;
    return [found.node, at - found.from];
  };
  const ranges: Range[] = [];
  for (let at = lower.indexOf(wanted); at >= 0 && ranges.length < MAX_RANGES; at = lower.indexOf(wanted, at + wanted.length)) {
    const range = document.createRange();
    range.setStart(...place(at));
    const [last, offset] = place(at + wanted.length - 1);
    range.setEnd(last, offset + 1);
    ranges.push(range);
  }
  return ranges;
}

/** Scrolls so that the middle of the first range, or of the element, is in the middle of the box. */
function center(box: Element, element: Element, range: Range | undefined): void {
  const { top, height } = (range ?? element).getBoundingClientRect();
  const frame = box.getBoundingClientRect();
  if (range || height < frame.height) box.scrollTop += top + height / 2 - (frame.top + frame.height / 2);
  else box.scrollTop += top - frame.top;
}

/** Shows the match in `box`, marks its words, and gives its message the focus. Returns whether it is there to be shown. */
export function showMatch(wanted: Jump, box: Element): boolean {
  const target = shownTarget(wanted);
  const element = target && box.querySelector<HTMLElement>(`[data-message="${CSS.escape(target.id)}"]`);
  if (!element) return false;
  element.scrollIntoView({ block: "center" });
  stay(wanted, box, element);
  element.focus({ preventScroll: true });
  return true;
}

/**
 * Keeps the match in sight while messages that come into it get their real heights and formulas are set, which may have
 * to be loaded first; until the reader does something.
 */
function stay(wanted: Jump, box: Element, element: Element): void {
  const settle = () => {
    if (jump.peek() !== wanted) return stop();
    const ranges = rangesOf(element, wanted.text);
    if ("highlights" in CSS) CSS.highlights.set(HIGHLIGHT, new Highlight(...ranges));
    center(box, element, ranges[0]);
  };
  const follow = new ResizeObserver(settle);
  const stop = () => {
    follow.disconnect();
    for (const type of ACTS) removeEventListener(type, stop, true);
  };
  for (const type of ACTS) addEventListener(type, stop, { capture: true, passive: true });
  follow.observe(element);
  for (const inner of box.children) follow.observe(inner);
  settle();
}

export function endSearch(): void {
  jump.value = undefined;
  if ("highlights" in CSS) CSS.highlights.delete(HIGHLIGHT);
}
