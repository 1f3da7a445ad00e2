// The list of chats, search in them, and the way to the other views.
import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { live } from "./state/answer";
import { isComposing } from "./keys";
import { t } from "./i18n";
import { Icon, Logo } from "./icons";
import { endSearch, jump } from "./chat/jump";
import { chats, isSidebarOpen, open, shownDialog, view } from "./state/state";
import { search, type Match } from "./storage/store";
import type { Chat } from "./storage/types";

function groupOf(time: number): "today" | "yesterday" | "earlier" {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "today";
  return time >= midnight - 86_400_000 ? "yesterday" : "earlier";
}

function ChatLink({ chat, match, text }: { chat: Chat; match: Match | undefined; text: string }) {
  const now = view.value;
  const isShown = now.name === "chat" && now.id === chat.id;
  const isLive = [...live.value.values()].some((one) => one.message.peek().chat === chat.id);
  return (
    <li>
      <a
        href={`#/chat/${chat.id}`}
        aria-current={isShown ? "page" : undefined}
        onClick={() => {
          isSidebarOpen.value = false;
          if (match) jump.value = { chat: chat.id, message: match.message, text };
          else endSearch();
        }}
      >
        <span class="title">{chat.title}</span>
        {isLive && <span class="pulse" role="img" aria-label={t("answering")} />}
        {match && <span class="excerpt">{match.excerpt}</span>}
      </a>
    </li>
  );
}

export function Sidebar() {
  const query = useSignal("");
  const found = useSignal<Map<string, Match> | undefined>(undefined);
  useEffect(() => {
    const text = query.value.trim();
    endSearch();
    if (!text) {
      found.value = undefined;
      return;
    }
    const timer = setTimeout(() => {
      void search(text).then((excerpts) => {
        if (query.value.trim() === text) found.value = excerpts;
      });
    }, 120);
    return () => clearTimeout(timer);
  }, [query.value]);

  const closer = useRef<HTMLButtonElement>(null);
  useEffect(() => {
    if (isSidebarOpen.value && document.activeElement?.id !== "search") closer.current?.focus();
  }, [isSidebarOpen.value]);

  const first = async () => {
    const text = query.value.trim();
    if (!text) return;
    found.value = await search(text); // it may be typed faster than it is looked for
    requestAnimationFrame(() => list.current?.querySelector("a")?.click());
  };
  const list = useRef<HTMLDivElement>(null);
  const wanted = query.value.trim().toLowerCase();
  const shown = chats.value.filter(
    (chat) => !wanted || chat.title.toLowerCase().includes(wanted) || found.value?.has(chat.id),
  );
  const close = () => (isSidebarOpen.value = false);
  return (
    <nav class={isSidebarOpen.value ? "sidebar open" : "sidebar"} aria-label={t("chats")}>
      <div class="brand">
        <Logo />
        <span>ktransformers</span>
        <button ref={closer} class="quiet only-narrow" aria-label={t("close")} onClick={close}>
          <Icon name="close" />
        </button>
      </div>
      <a class="new-chat" href="#/" onClick={() => { close(); open({ name: "new" }); }}>
        <Icon name="plus" /> {t("newChat")}
      </a>
      <label class="search">
        <Icon name="search" />
        <span class="sr-only">{t("search")}</span>
        <input
          id="search"
          type="search"
          placeholder={t("search")}
          autocomplete="off"
          value={query.value}
          onInput={(event) => (query.value = event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key === "Enter" && !isComposing(event)) void first();
          }}
        />
      </label>
      <div class="chat-list" ref={list}>
        {!shown.length && <p class="hint">{wanted ? t("noMatch") : t("noChats")}</p>}
        {(["today", "yesterday", "earlier"] as const).map((group) => {
          const members = shown.filter((chat) => groupOf(chat.updated) === group);
          return (
            members.length > 0 && (
              <section key={group}>
                <h2>{t(group)}</h2>
                <ul>
                  {members.map((chat) => (
                    <ChatLink key={chat.id} chat={chat} match={wanted ? found.value?.get(chat.id) : undefined} text={wanted} />
                  ))}
                </ul>
              </section>
            )
          );
        })}
      </div>
      <div class="foot">
        <a href="#/status" aria-current={view.value.name === "status" ? "page" : undefined} onClick={close}>
          <Icon name="chart" /> {t("status")}
        </a>
        <button onClick={() => { close(); shownDialog.value = "preferences"; }}>
          <Icon name="gear" /> {t("preferences")}
        </button>
      </div>
    </nav>
  );
}
