// One chat: its messages in the shown branch, and the field to write in.
import { useSignal } from "@preact/signals";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { liveHere, stopAnswers } from "../state/answer";
import { Composer } from "./Composer";
import { ask } from "../dialogs/Confirm";
import { enterHint, isComposing } from "../keys";
import { ContextWarning } from "./Context";
import { n, t } from "../i18n";
import { Icon, Logo } from "../icons";
import { Announcer } from "./Announcer";
import { MessageView } from "./MessageView";
import { jump, showMatch, type Jump } from "./jump";
import { changeChat, chat, isSidebarOpen, model, obstacle, openSidebar, path, readsPictures, removeChat, shownDialog } from "../state/state";
import { download, exportChats } from "../state/transfer";

export function MenuButton() {
  return (
    <button class="quiet only-narrow" aria-label={t("menu")} aria-expanded={isSidebarOpen.value} onClick={openSidebar}>
      <Icon name="menu" />
    </button>
  );
}

function Title() {
  const isEdited = useSignal(false);
  const field = useRef<HTMLInputElement>(null);
  const own = chat.value;
  useLayoutEffect(() => {
    if (isEdited.value) field.current?.select();
  }, [isEdited.value]);
  useEffect(() => {
    isEdited.value = false;
  }, [own?.id]);
  if (!own) return <h1 class="chat-title">{t("newChat")}</h1>;
  if (!isEdited.value) {
    return (
      <h1 class="chat-title">
        <button class="quiet" title={t("rename")} onClick={() => (isEdited.value = true)}>
          {own.title}
        </button>
      </h1>
    );
  }
  const done = () => {
    const title = field.current?.value.trim(); // leaving the page takes the focus, too
    isEdited.value = false;
    if (title && title !== own.title) void changeChat(own.id, { title });
  };
  return (
    <input
      ref={field}
      class="chat-title"
      aria-label={t("chatName")}
      maxLength={120}
      value={own.title}
      onBlur={done}
      onKeyDown={(event) => {
        if (isComposing(event)) return;
        if (event.key === "Enter") done();
        else if (event.key === "Escape") {
          event.stopPropagation();
          isEdited.value = false;
        }
      }}
    />
  );
}

function Header() {
  const own = chat.value;
  const remove = async () => {
    if (!(await ask(t("deleteChat"), t("deleteChatText", own!.title), t("delete")))) return;
    stopAnswers(own!.id);
    await removeChat(own!.id);
  };
  const save = async () => {
    const name = own!.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "chat";
    download(`${name}.json`, await exportChats([own!]));
  };
  return (
    <header class="bar">
      <MenuButton />
      <Title />
      {model.value && <span class="model-name" title={model.value.id}>{model.value.id}</span>}
      {own && (
        <>
          <button class="quiet" title={t("exportChat")} aria-label={t("exportChat")} onClick={() => void save()}>
            <Icon name="download" />
          </button>
          <button class="quiet" title={t("delete")} aria-label={t("delete")} onClick={() => void remove()}>
            <Icon name="trash" />
          </button>
        </>
      )}
      <button class="quiet" title={t("settings")} aria-label={t("settings")} onClick={() => (shownDialog.value = "settings")}>
        <Icon name="sliders" />
      </button>
    </header>
  );
}

function Greeting() {
  const size = model.value?.max_model_len;
  return (
    <div class="greeting">
      <Logo />
      <h2>{t("greeting")}</h2>
      <p>{t(enterHint() === "send" ? "greetingHint" : "greetingHintTouch")}{readsPictures.value && ` ${t("greetingPictures")}`}</p>
      {model.value && <p class="facts">{model.value.id}{size ? ` · ${t("tokens", n(size))}` : ""}</p>}
    </div>
  );
}

export function ChatView() {
  const scroller = useRef<HTMLDivElement>(null);
  const content = useRef<HTMLDivElement>(null);
  const isAtEnd = useSignal(true);
  /** The largest scrollTop when it was last looked at. */
  const end = useRef(0);
  const shown = path.value;

  // Follows the answer while the reader is at its end, and stays where the reader has scrolled to.
  useLayoutEffect(() => {
    const [box, inner] = [scroller.current!, content.current!];
    const follow = new ResizeObserver(() => {
      if (isAtEnd.peek()) box.scrollTop = box.scrollHeight;
      end.current = box.scrollHeight - box.clientHeight;
    });
    follow.observe(inner);
    follow.observe(box);
    return () => follow.disconnect();
  }, []);
  useLayoutEffect(() => {
    isAtEnd.value = true;
    scroller.current!.scrollTop = scroller.current!.scrollHeight;
  }, [chat.value?.id, shown.length]);
  const wanted = jump.value;
  const jumped = useRef<Jump | undefined>(undefined);
  useEffect(() => {
    if (!wanted || wanted === jumped.current || wanted.chat !== chat.value?.id) return;
    isAtEnd.value = false;
    if (showMatch(wanted, scroller.current!)) jumped.current = wanted;
  }, [wanted, shown]);
  const onScroll = ({ currentTarget: box }: { currentTarget: HTMLElement }) => {
    const now = box.scrollHeight - box.clientHeight;
    isAtEnd.value = Math.min(now, end.current) - box.scrollTop < 48; // near an end that has moved away since is at the end
    end.current = now;
  };
  return (
    <>
      <Header />
      <div class="scroller" ref={scroller} onScroll={onScroll} tabIndex={0} role="region" aria-label={t("message")}>
        <div class="messages" ref={content}>
          {shown.length ? shown.map((message) => <MessageView key={message.id} message={message} />) : <Greeting />}
        </div>
      </div>
      <Announcer live={liveHere.value} />
      <div class="bottom">
        {!isAtEnd.value && (
          <button
            class="to-end"
            aria-label={t("toBottom")}
            onClick={() => {
              isAtEnd.value = true;
              scroller.current!.scrollTop = scroller.current!.scrollHeight;
            }}
          >
            <Icon name="down" />
          </button>
        )}
        {obstacle.value && (
          <p class="obstacle" role="status">
            <span class="pulse" aria-hidden="true" /> {obstacle.value}
          </p>
        )}
        <ContextWarning />
        <Composer />
      </div>
    </>
  );
}
