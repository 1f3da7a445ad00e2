// One message: text, files, reasoning, tool calls, and what can be done with it.
import { useSignal } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import { canGoOn, goOn, live, retry, send, sendResults, type LiveAnswer } from "../state/answer";
import { copyText } from "../clipboard";
import { enterHint, isComposing, sends } from "../keys";
import { Attachments } from "./Attachments";
import { isTooLong, LeftOut, TooLong } from "./Context";
import { n, t } from "../i18n";
import { Icon, type IconName } from "../icons";
import { Markdown } from "../markdown/Markdown";
import { liveElsewhere } from "../state/others";
import { messages, model, notice, path, select } from "../state/state";
import { childrenOf } from "../storage/tree";
import type { Attached, Message, ToolCall } from "../storage/types";

function Action({ name, label, onClick, isOff }: { name: IconName; label: string; onClick: () => void; isOff?: boolean }) {
  return (
    <button class="quiet" title={label} aria-label={label} onClick={onClick} disabled={isOff}>
      <Icon name={name} />
    </button>
  );
}

function Branches({ message }: { message: Message }) {
  const siblings = childrenOf(messages.value, message.parent);
  if (siblings.length < 2) return null;
  const at = siblings.findIndex((one) => one.id === message.id);
  return (
    <span class="branches" role="group" aria-label={t("version", at + 1, siblings.length)}>
      <Action name="left" label={t("previous")} isOff={at === 0} onClick={() => select(siblings[at - 1]!)} />
      <span class="numbers" aria-hidden="true">{at + 1}/{siblings.length}</span>
      <Action name="right" label={t("next")} isOff={at === siblings.length - 1} onClick={() => select(siblings[at + 1]!)} />
    </span>
  );
}

function Copy({ text }: { text: string }) {
  return (
    <Action
      name="copy"
      label={t("copy")}
      onClick={() => void copyText(text).then((isDone) => (notice.value = t(isDone ? "copied" : "copyFailed")))}
    />
  );
}

function Editor({ message, onDone }: { message: Message; onDone: () => void }) {
  const field = useRef<HTMLTextAreaElement>(null);
  const files = useSignal<Attached[]>(message.files ?? []);
  useLayoutEffect(() => {
    const area = field.current!;
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }, []);
  const done = () => {
    const text = field.current!.value.trim();
    if (!text && !files.value.length) return;
    onDone();
    void send(text, files.value, message.parent);
  };
  return (
    <div class="editor">
      {files.value.length > 0 && (
        <Attachments
          files={files.value}
          onRemove={(index) => {
            files.value = files.value.filter((_, i) => i !== index);
            field.current!.focus(); // the button goes away
          }}
        />
      )}
      <textarea
        ref={field}
        aria-label={t("edit")}
        enterkeyhint={enterHint()}
        rows={Math.min(12, message.content.split("\n").length + 1)}
        defaultValue={message.content}
        onKeyDown={(event) => {
          if (event.key === "Escape" && !isComposing(event)) {
            event.stopPropagation();
            onDone();
          } else if (sends(event)) {
            event.preventDefault();
            done();
          }
        }}
      />
      <div class="editor-foot">
        <span class="hint">{t("editHint")}</span>
        <button onClick={onDone}>{t("cancel")}</button>
        <button class="primary" onClick={done}>{t("saveAndSend")}</button>
      </div>
    </div>
  );
}

function UserMessage({ message }: { message: Message }) {
  const isEdited = useSignal(false);
  if (isEdited.value) return <Editor message={message} onDone={() => (isEdited.value = false)} />;
  return (
    <>
      <div class="bubble">
        {message.files && <Attachments files={message.files} />}
        {message.content && <div class="plain">{message.content}</div>}
      </div>
      <div class="actions">
        <Branches message={message} />
        <Copy text={message.content} />
        <Action name="edit" label={t("edit")} onClick={() => (isEdited.value = true)} />
      </div>
    </>
  );
}

function Reasoning({ message, isLive }: { message: Message; isLive: boolean }) {
  const isOpen = useSignal(false);
  const isThinking = isLive && !message.content && !message.calls;
  const seconds = message.reasoningSeconds;
  const label = isThinking ? t("thinking") : seconds && seconds >= 0.1 ? t("thoughtFor", n(seconds, 1)) : t("thought");
  return (
    <details class="reasoning" onToggle={(event) => (isOpen.value = event.currentTarget.open)}>
      <summary>
        <Icon name="right" />
        <span class={isThinking ? "shimmer" : ""}>{label}</span>
      </summary>
      {isOpen.value && <Markdown text={message.reasoning ?? ""} />}
    </details>
  );
}

function pretty(json: string): string {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // still on its way, or not JSON at all
  }
}

function Calls({ message, isLive }: { message: Message; isLive: boolean }) {
  const calls = message.calls ?? [];
  const fields = useRef<(HTMLTextAreaElement | null)[]>([]);
  const isLast = path.value.at(-1)?.id === message.id;
  return (
    <div class="calls">
      {calls.map((call: ToolCall, index) => (
        <section class="call" key={call.id}>
          <h3><Icon name="tool" /> {t("toolCall", call.name)}</h3>
          <pre tabIndex={0} role="group" aria-label={t("code")}><code>{pretty(call.arguments)}</code></pre>
          {isLast && !isLive && (
            <textarea
              rows={2}
              ref={(field) => { fields.current[index] = field; }}
              placeholder={t("giveResult", call.name)}
              aria-label={t("giveResult", call.name)}
            />
          )}
        </section>
      ))}
      {isLast && !isLive && (
        <button onClick={() => void sendResults(message, calls.map((_, index) => fields.current[index]?.value ?? ""))}>
          {t("sendResults")}
        </button>
      )}
    </div>
  );
}

function Figures({ message, rate }: { message: Message; rate: number }) {
  const { usage } = message;
  if (message.state === "streaming") return rate > 0 ? <span class="figures">{t("tokensPerSecond", n(rate, 1))}</span> : null;
  if (!usage) return null;
  const parts = [
    t(usage.isRest ? "moreTokens" : "tokens", n(usage.completion)),
    ...(usage.decode > 0 && usage.completion > 1 ? [t("tokensPerSecond", n((usage.completion - 1) / usage.decode, 1))] : []),
    t("firstTokenAfter", n(usage.firstToken, 2)),
  ];
  const size = model.value?.max_model_len;
  const more = [
    size ? t("contextUse", n(usage.prompt + usage.completion), n(size)) : "",
    usage.cached ? t("cachedTokens", n(usage.cached)) : "",
    message.model ?? "",
  ].filter(Boolean);
  return <span class="figures" title={more.join(" · ")}>{parts.join(" · ")}</span>;
}

function endingOf(message: Message, isLive: boolean): string {
  if (message.state === "streaming" && liveElsewhere.value.has(message.id)) return t("elsewhere");
  if (message.state === "streaming") return isLive ? "" : t("interrupted");
  if (message.state === "stopped") return t("stopped");
  return message.state === "length" ? t("lengthEnd") : "";
}

function GoOn({ message }: { message: Message }) {
  const start = () => {
    void goOn(message);
    if (matchMedia("(min-width: 50rem)").matches) document.getElementById("composer")?.focus(); // the button goes away
  };
  return (
    <div class="go-on">
      <button onClick={start}><Icon name="play" /> {t("goOn")}</button>
    </div>
  );
}

function Answer({ message, answer }: { message: Message; answer: LiveAnswer | undefined }) {
  const isLive = answer !== undefined;
  const ending = endingOf(message, isLive);
  return (
    <>
      <LeftOut message={message} />
      {message.reasoning && <Reasoning message={message} isLive={isLive} />}
      {message.content && <Markdown text={message.content} />}
      {isLive && !message.content && !message.reasoning && !message.calls && (
        <p class="waiting"><span class="pulse" role="img" aria-label={t("answering")} /></p>
      )}
      {message.calls && <Calls message={message} isLive={isLive} />}
      {message.error && <p class="error" role="alert">{message.error}</p>}
      {isTooLong(message) && <TooLong message={message} />}
      {ending && <p class="ending">{ending}</p>}
      {canGoOn(message) && !isTooLong(message) && <GoOn message={message} />}
      <div class="actions">
        <Branches message={message} />
        {!isLive && !liveElsewhere.value.has(message.id) && (
          <>
            <Copy text={message.content} />
            <Action name="retry" label={t("retry")} onClick={() => void retry(message)} />
          </>
        )}
        <Figures message={message} rate={answer?.rate.value ?? 0} />
      </div>
    </>
  );
}

function ToolResult({ message }: { message: Message }) {
  const call = messages.value.get(message.parent)?.calls?.find((one) => one.id === message.callId);
  return (
    <details class="reasoning">
      <summary><Icon name="tool" /> {t("toolResult", call?.name ?? message.callId ?? "")}</summary>
      <div class="plain">{message.content}</div>
    </details>
  );
}

export function MessageView({ message: stored }: { message: Message }) {
  const answer = live.value.get(stored.id);
  const message = answer?.message.value ?? stored;
  const who = message.role === "user" ? t("you") : message.role === "tool" ? t("toolResult", "") : t("assistant");
  return (
    <article
      class={`message ${message.role}`}
      data-message={message.id}
      tabIndex={-1}
      aria-label={who}
      aria-busy={answer !== undefined}
    >
      {message.role === "user" && <UserMessage message={message} />}
      {message.role === "assistant" && <Answer message={message} answer={answer} />}
      {message.role === "tool" && <ToolResult message={message} />}
    </article>
  );
}
