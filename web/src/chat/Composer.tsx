// The field to write in. Files come by drop, by paste or by the button.
import { useSignal } from "@preact/signals";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { liveHere, send, stopAnswers } from "../state/answer";
import { draftOf, setFiles, setText, type Draft } from "../storage/drafts";
import { enterHint, isComposing, sends } from "../keys";
import { readFiles, refusalText } from "../files/read";
import { t } from "../i18n";
import { Icon } from "../icons";
import { FileChips } from "./MessageView";
import { liveElsewhere } from "../state/others";
import { jump } from "./jump";
import { chat, isKeyWanted, notice, obstacle, path, view } from "../state/state";

/** Reads files into a draft, and names those that cannot be read. */
async function take(draft: Draft, list: Iterable<File>): Promise<void> {
  const wanted = [...list]; // the browser empties its own list
  draft.numReading.value += wanted.length;
  const { files, refused } = await readFiles(wanted);
  draft.numReading.value -= wanted.length;
  if (files.length) setFiles(draft, [...draft.files.value, ...files]);
  if (refused.length) notice.value = refusalText(refused);
}

export function Composer() {
  const field = useRef<HTMLTextAreaElement>(null);
  const picker = useRef<HTMLInputElement>(null);
  const draft = draftOf(chat.value?.id ?? "");
  const { text, files } = draft;
  const isReading = draft.numReading.value > 0;
  const isDragging = useSignal(false);
  const answer = liveHere.value;
  const isBlocked = Boolean(obstacle.value || isKeyWanted.value);

  useEffect(() => {
    const has = (event: DragEvent) => event.dataTransfer?.types.includes("Files") ?? false;
    const over = (event: DragEvent) => {
      if (!has(event)) return;
      event.preventDefault();
      isDragging.value = true;
    };
    const leave = (event: DragEvent) => {
      if (!event.relatedTarget) isDragging.value = false;
    };
    const drop = (event: DragEvent) => {
      if (!has(event)) return;
      event.preventDefault();
      isDragging.value = false;
      void take(draft, event.dataTransfer!.files);
    };
    addEventListener("dragover", over);
    addEventListener("dragleave", leave);
    addEventListener("drop", drop);
    return () => {
      removeEventListener("dragover", over);
      removeEventListener("dragleave", leave);
      removeEventListener("drop", drop);
    };
  }, [draft]);
  useEffect(() => {
    if (jump.peek() && jump.peek()?.chat === chat.peek()?.id) return; // the match has the focus
    if (matchMedia("(min-width: 50rem)").matches) field.current?.focus();
  }, [view.value]);
  useLayoutEffect(() => {
    const area = field.current!;
    area.style.height = "auto";
    area.style.height = `${Math.min(area.scrollHeight, innerHeight * 0.4)}px`;
  }, [text.value]);

  const isElsewhere = liveElsewhere.value.has(path.value.at(-1)?.id ?? "");
  const canSend = !answer && !isReading && !isElsewhere && !isBlocked && Boolean(text.value.trim() || files.value.length);
  const submit = () => {
    if (!canSend) return;
    const [said, given] = [text.value.trim(), files.value];
    setText(draft, "");
    setFiles(draft, []);
    void send(said, given, path.value.at(-1)?.id ?? "");
  };
  const onKeyDown = (event: KeyboardEvent) => {
    const isEmpty = !text.value && !files.value.length;
    if (sends(event)) {
      event.preventDefault();
      if (isEmpty && (event.ctrlKey || event.metaKey)) document.querySelector<HTMLButtonElement>(".go-on button")?.click();
      else submit();
    } else if (event.key === "ArrowUp" && !text.value && !isComposing(event)) {
      const edits = document.querySelectorAll<HTMLButtonElement>(`.message.user button[aria-label="${t("edit")}"]`);
      const last = [...edits].at(-1);
      if (last) event.preventDefault();
      last?.click();
    }
  };
  return (
    <form class="composer" onSubmit={(event) => { event.preventDefault(); submit(); }}>
      {files.value.length > 0 && (
        <FileChips files={files.value} onRemove={(index) => setFiles(draft, files.value.filter((_, i) => i !== index))} />
      )}
      {isReading && (
        <p class="reading" role="status"><span class="pulse" aria-hidden="true" /> {t("readingFiles")}</p>
      )}
      <textarea
        id="composer"
        ref={field}
        rows={1}
        aria-label={t("message")}
        placeholder={t("messageHint")}
        value={text.value}
        enterkeyhint={enterHint()}
        onInput={(event) => setText(draft, event.currentTarget.value)}
        onKeyDown={onKeyDown}
        onPaste={(event) => {
          const pasted = event.clipboardData?.files;
          if (!pasted?.length) return;
          event.preventDefault();
          void take(draft, pasted);
        }}
      />
      <div class="composer-foot">
        <button type="button" class="quiet" title={t("attach")} aria-label={t("attach")} onClick={() => picker.current?.click()}>
          <Icon name="plus" />
        </button>
        <input
          ref={picker}
          type="file"
          multiple
          hidden
          aria-label={t("attach")}
          onChange={(event) => {
            void take(draft, event.currentTarget.files ?? []);
            event.currentTarget.value = "";
          }}
        />
        {answer ? (
          <button type="button" class="round primary" title={`${t("stop")} (Esc)`} aria-label={t("stop")} onClick={() => stopAnswers(answer.message.value.chat)}>
            <Icon name="stop" />
          </button>
        ) : (
          <button class="round primary" title={`${t("send")} (Enter)`} aria-label={t("send")} disabled={!canSend}>
            <Icon name="send" />
          </button>
        )}
      </div>
      {isDragging.value && <div class="drop-hint">{t("dropHere")}</div>}
    </form>
  );
}
