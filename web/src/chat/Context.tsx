// A context that is full, or nearly: the warning, the way on without the oldest messages, and the line that says so.
import { canDropOldest, goOnWithoutOldest, live } from "../state/answer";
import { n, t } from "../i18n";
import { Icon } from "../icons";
import { changeSettings, chat, model, path, settings } from "../state/state";
import type { Message } from "../storage/types";

const WARN_AT = 0.8; // of the context

export function isTooLong(message: Message): boolean {
  return message.state === "error" && message.errorCode === "context_length_exceeded";
}

function focusComposer(): void {
  if (matchMedia("(min-width: 50rem)").matches) document.getElementById("composer")?.focus(); // the button goes away
}

/** Tokens of the shown conversation up to its last counted answer. */
function usedTokens(): number {
  const usage = path.value.findLast((message) => message.usage)?.usage;
  return usage ? usage.prompt + usage.completion : 0;
}

/** Above the field to write in, once most of the context is taken. */
export function ContextWarning() {
  const size = model.value?.max_model_len ?? 0;
  const used = usedTokens();
  const last = path.value.at(-1);
  const isShown = size > 0 && used >= WARN_AT * size && last !== undefined && !live.value.has(last.id) && !isTooLong(last);
  const drops = settings.value.dropsOldest === true;
  const hasDropped = path.value.some((message) => message.dropped);
  return (
    <div role="status">
      {isShown && !hasDropped && (
        <p class="context-warning">
          <span>
            {t("contextUsed", n(Math.min(100, Math.floor((100 * used) / size))), n(used), n(size))}{" "}
            {t(drops ? "contextWillDrop" : "contextWillEnd")}
          </span>
          {!drops && chat.value && (
            <button
              type="button"
              onClick={() => {
                changeSettings({ ...settings.value, dropsOldest: true });
                focusComposer();
              }}
            >
              {t("dropOldest")}
            </button>
          )}
        </p>
      )}
    </div>
  );
}

/** Below the error of a request that was too long: how to go on. */
export function TooLong({ message }: { message: Message }) {
  if (!canDropOldest(message)) return path.value.at(-1)?.id === message.id ? <p class="ending">{t("tooLongAlone")}</p> : null;
  return (
    <div class="go-on">
      <button
        onClick={() => {
          void goOnWithoutOldest(message);
          focusComposer();
        }}
      >
        <Icon name="play" /> {t("goOnWithoutOldest")}
      </button>
    </div>
  );
}

/** Before an answer whose prompt went without other messages than that of the answer before it. */
export function LeftOut({ message }: { message: Message }) {
  const num = message.dropped ?? 0;
  if (!num) return null;
  const at = path.value.findIndex((one) => one.id === message.id);
  const before = path.value.slice(0, Math.max(at, 0)).findLast((one) => one.role === "assistant" && one.state !== "error");
  if (before?.dropped === num) return null;
  return <p class="left-out" role="note">{t(num === 1 ? "leftOutOne" : "leftOut", n(num))}</p>;
}
