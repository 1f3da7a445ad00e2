// The field to write in. Text files come by drop, by paste or by the button.
import { useSignal } from "@preact/signals";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { liveHere, send, stopAnswers } from "./answer";
import { t } from "./i18n";
import { Icon } from "./icons";
import { FileChips } from "./MessageView";
import { liveElsewhere } from "./others";
import { isKeyWanted, notice, obstacle, path, view } from "./state";
import type { TextFile } from "./types";

const MAX_FILE = 1 << 20;

async function readText(file: File): Promise<TextFile | string> {
  if (file.size > MAX_FILE) return t("tooLarge", file.name);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? t("notText", file.name) : { name: file.name, text };
  } catch {
    return t("notText", file.name);
  }
}

export function Composer() {
  const field = useRef<HTMLTextAreaElement>(null);
  const picker = useRef<HTMLInputElement>(null);
  const text = useSignal("");
  const files = useSignal<TextFile[]>([]);
  const isDragging = useSignal(false);
  const answer = liveHere.value;
  const isBlocked = Boolean(obstacle.value || isKeyWanted.value);

  const take = async (list: Iterable<File>) => {
    for (const read of await Promise.all([...list].map(readText))) {
      if (typeof read === "string") notice.value = read;
      else files.value = [...files.value, read];
    }
  };
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
      void take(event.dataTransfer!.files);
    };
    addEventListener("dragover", over);
    addEventListener("dragleave", leave);
    addEventListener("drop", drop);
    return () => {
      removeEventListener("dragover", over);
      removeEventListener("dragleave", leave);
      removeEventListener("drop", drop);
    };
  }, []);
  useEffect(() => {
    if (matchMedia("(min-width: 50rem)").matches) field.current?.focus();
  }, [view.value]);
  useLayoutEffect(() => {
    const area = field.current!;
    area.style.height = "auto";
    area.style.height = `${Math.min(area.scrollHeight, innerHeight * 0.4)}px`;
  }, [text.value]);

  const isElsewhere = liveElsewhere.value.has(path.value.at(-1)?.id ?? "");
  const canSend = !answer && !isElsewhere && !isBlocked && Boolean(text.value.trim() || files.value.length);
  const submit = () => {
    if (!canSend) return;
    const [said, given] = [text.value.trim(), files.value];
    text.value = "";
    files.value = [];
    void send(said, given, path.value.at(-1)?.id ?? "");
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key === "Enter" && event.ctrlKey && !text.value && !files.value.length) {
      document.querySelector<HTMLButtonElement>(".go-on button")?.click();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    } else if (event.key === "ArrowUp" && !text.value) {
      const edits = document.querySelectorAll<HTMLButtonElement>(`.message.user button[aria-label="${t("edit")}"]`);
      const last = [...edits].at(-1);
      if (last) event.preventDefault();
      last?.click();
    }
  };
  return (
    <form class="composer" onSubmit={(event) => { event.preventDefault(); submit(); }}>
      {files.value.length > 0 && (
        <FileChips files={files.value} onRemove={(index) => (files.value = files.value.filter((_, i) => i !== index))} />
      )}
      <textarea
        id="composer"
        ref={field}
        rows={1}
        aria-label={t("message")}
        placeholder={t("messageHint")}
        value={text.value}
        onInput={(event) => (text.value = event.currentTarget.value)}
        onKeyDown={onKeyDown}
        onPaste={(event) => {
          const pasted = event.clipboardData?.files;
          if (!pasted?.length) return;
          event.preventDefault();
          void take(pasted);
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
            void take(event.currentTarget.files ?? []);
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
