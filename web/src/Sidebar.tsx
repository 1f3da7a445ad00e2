// The list of chats, search in them, and the way to the other views.
import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { live } from "./answer";
import { t } from "./i18n";
import { Icon, Logo } from "./icons";
import { chats, isSidebarOpen, open, shownDialog, view } from "./state";
import { search } from "./store";
import type { Chat } from "./types";

function groupOf(time: number): "today" | "yesterday" | "earlier" {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "today";
  return time >= midnight - 86_400_000 ? "yesterday" : "earlier";
}

function ChatLink({ chat, excerpt }: { chat: Chat; excerpt?: string | undefined }) {
  const now = view.value;
  const isShown = now.name === "chat" && now.id === chat.id;
  const isLive = [...live.value.values()].some((one) => one.message.peek().chat === chat.id);
  return (
    <li>
      <a
        href={`#/chat/${chat.id}`}
        aria-current={isShown ? "page" : undefined}
        onClick={() => (isSidebarOpen.value = false)}
      >
        <span class="title">{chat.title}</span>
        {isLive && <span class="pulse" role="img" aria-label={t("answering")} />}
        {excerpt && <span class="excerpt">{excerpt}</span>}
      </a>
    </li>
  );
}

export function Sidebar() {
  const query = useSignal("");
  const found = useSignal<Map<string, string> | undefined>(undefined);
  useEffect(() => {
    const text = query.value.trim();
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
        />
      </label>
      <div class="chat-list">
        {!shown.length && <p class="hint">{wanted ? t("noMatch") : t("noChats")}</p>}
        {(["today", "yesterday", "earlier"] as const).map((group) => {
          const members = shown.filter((chat) => groupOf(chat.updated) === group);
          return (
            members.length > 0 && (
              <section key={group}>
                <h2>{t(group)}</h2>
                <ul>
                  {members.map((chat) => (
                    <ChatLink key={chat.id} chat={chat} excerpt={wanted ? found.value?.get(chat.id) : undefined} />
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
