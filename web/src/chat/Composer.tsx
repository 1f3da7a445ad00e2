// The field to write in. Files come by drop, by paste or by the buttons.
import { useSignal } from "@preact/signals";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { liveHere, send, stopAnswers } from "../state/answer";
import { draftOf, removeFile, setFiles, setText, type Draft } from "../storage/drafts";
import { enterHint, isComposing, sends } from "../keys";
import { readFiles, refusalText } from "../files/read";
import { t } from "../i18n";
import { Icon, type IconName } from "../icons";
import { putPicture } from "../storage/store";
import { nextParent } from "../storage/tree";
import { Attachments } from "./Attachments";
import { liveElsewhere } from "../state/others";
import { jump } from "./jump";
import { chat, isKeyWanted, notice, obstacle, path, readsPictures, view } from "../state/state";

/** Reads files into a draft, and names those that cannot be read. */
async function take(draft: Draft, list: Iterable<File>): Promise<void> {
  const wanted = [...list]; // the browser empties its own list
  draft.numReading.value += wanted.length;
  const { files, refused } = await readFiles(wanted, readsPictures.value ? (blob) => putPicture(draft.chat, blob) : undefined);
  draft.numReading.value -= wanted.length;
  if (files.length) setFiles(draft, [...draft.files.value, ...files]);
  if (refused.length) notice.value = refusalText(refused);
}

/** Office programs put a picture of a text beside it: there the text is meant. */
function isText(pasted: DataTransfer): boolean {
  return pasted.types.includes("text/html") && Boolean(pasted.getData("text/plain").trim());
}

/** A button that asks for files; `accept` as the input has it. On phones image/* offers the camera and its roll. */
function Picker({ label, icon, accept, onPick }: { label: string; icon: IconName; accept?: string; onPick: (files: FileList) => void }) {
  const input = useRef<HTMLInputElement>(null);
  return (
    <>
      <button type="button" class="quiet" title={label} aria-label={label} onClick={() => input.current?.click()}>
        <Icon name={icon} />
      </button>
      <input
        ref={input}
        type="file"
        multiple
        hidden
        accept={accept}
        aria-label={label}
        onChange={(event) => {
          onPick(event.currentTarget.files!);
          event.currentTarget.value = "";
        }}
      />
    </>
  );
}

export function Composer() {
  const field = useRef<HTMLTextAreaElement>(null);
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
    void send(said, given, nextParent(path.value));
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
        <Attachments
          files={files.value}
          onRemove={(index) => {
            removeFile(draft, index);
            if (matchMedia("(min-width: 50rem)").matches) field.current?.focus(); // the button goes away
          }}
        />
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
          if (!pasted?.length || isText(event.clipboardData!)) return;
          event.preventDefault();
          void take(draft, pasted);
        }}
      />
      <div class="composer-foot">
        <span class="pickers">
          <Picker label={t("attach")} icon="plus" onPick={(given) => void take(draft, given)} />
          {readsPictures.value && (
            <Picker label={t("attachPictures")} icon="picture" accept="image/*" onPick={(given) => void take(draft, given)} />
          )}
        </span>
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
      {isDragging.value && <div class="drop-hint">{t(readsPictures.value ? "dropHerePictures" : "dropHere")}</div>}
    </form>
  );
}
