// Other tabs of this browser: they show the same chats, and which answers they are reading is known here.
import { computed, signal } from "@preact/signals";
import { newId } from "../storage/store";

interface News {
  tab: string;
  /** Something in the store is new. */
  changed?: boolean;
  /** Ids of the messages that the tab is reading answers into. */
  live?: string[];
  /** Every tab is to say what it is reading. */
  asks?: boolean;
}

const ASK_EVERY = 4000; // ms; a tab that does not answer in between is gone

const tab = newId();
const channel = "BroadcastChannel" in window ? new BroadcastChannel("ktransformers") : undefined;
const byTab = signal<ReadonlyMap<string, { live: string[]; isHeard: boolean }>>(new Map());
let mine: string[] = [];
let onChange: () => void = () => undefined;
let timer = 0;

/** Ids of the messages that other tabs are reading answers into. */
export const liveElsewhere = computed(() => new Set([...byTab.value.values()].flatMap((one) => one.live)));

function say(news: Omit<News, "tab">): void {
  channel?.postMessage({ tab, ...news } satisfies News);
}

export function tellOthers(): void {
  say({ changed: true });
}

/** Says which answers this tab reads. */
export function tellLive(ids: string[]): void {
  if (ids.join() === mine.join()) return;
  mine = ids;
  say({ live: mine });
}

function hear(news: News): void {
  if (news.live) {
    const next = new Map(byTab.value);
    if (news.live.length) next.set(news.tab, { live: news.live, isHeard: true });
    else next.delete(news.tab);
    byTab.value = next;
    if (!news.live.length) onChange(); // the last of its text is in the store
    if (next.size && !timer) timer = window.setInterval(askAgain, ASK_EVERY);
  }
  if (news.asks && mine.length) say({ live: mine });
  if (news.changed) onChange();
}

function askAgain(): void {
  const heard = [...byTab.value].filter(([, one]) => one.isHeard);
  if (heard.length < byTab.value.size) onChange();
  byTab.value = new Map(heard.map(([id, one]) => [id, { ...one, isHeard: false }]));
  if (byTab.value.size) say({ asks: true });
  else {
    clearInterval(timer);
    timer = 0;
  }
}

/** Begins to listen. */
export function listen(whenChanged: () => void): void {
  onChange = whenChanged;
  channel?.addEventListener("message", (event: MessageEvent<News>) => hear(event.data));
  addEventListener("pagehide", () => mine.length && say({ live: [] }));
  say({ asks: true });
}
