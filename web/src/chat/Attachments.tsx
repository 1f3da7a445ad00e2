// What is attached to a message: texts by name, pictures as themselves, each in full on demand.
import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { Dialog } from "../dialogs/Dialog";
import { bytes, n, t } from "../i18n";
import { Icon } from "../icons";
import { pictureOf } from "../storage/store";
import { isPicture, type Attached, type Picture, type PictureFacts, type TextFile } from "../storage/types";

/** The address of a kept picture while it is shown; undefined until it is read, "" where it is gone. */
function usePicture(id: string): string | undefined {
  const url = useSignal<string | undefined>(undefined);
  useEffect(() => {
    let isShown = true;
    void pictureOf(id).then((blob) => {
      if (isShown) url.value = blob ? URL.createObjectURL(blob) : "";
    });
    return () => {
      isShown = false;
      if (url.peek()) URL.revokeObjectURL(url.peek()!);
      url.value = undefined;
    };
  }, [id]);
  return url.value;
}

function factsText({ type, width, height, size }: PictureFacts): string {
  return `${width} × ${height} · ${type.replace("image/", "").toUpperCase()} · ${bytes(size)}`;
}

function Facts({ picture }: { picture: Picture }) {
  const facts = factsText(picture);
  return <span class="hint">{picture.from ? t("madeFrom", facts, factsText(picture.from)) : facts}</span>;
}

function Thumbnail({ picture }: { picture: Picture }) {
  const url = usePicture(picture.picture);
  const isLarge = useSignal(false);
  const label = t("showPicture", picture.name);
  if (url === "") return <span class="hint">{t("pictureGone", picture.name)}</span>;
  return (
    <>
      <button
        type="button"
        class="thumbnail"
        title={label}
        aria-label={label}
        disabled={!url}
        onClick={() => (isLarge.value = true)}
      >
        {url && <img src={url} alt={picture.name} />}
      </button>
      {isLarge.value && (
        <Dialog title={picture.name} kind="picture" onClose={() => (isLarge.value = false)}>
          <img src={url} alt={picture.name} />
          <Facts picture={picture} />
        </Dialog>
      )}
    </>
  );
}

function TextFacts({ file }: { file: TextFile }) {
  return (
    <span class="hint">
      {file.encoding && <span title={t("readAs", file.encoding)}>{file.encoding} · </span>}
      {file.pages ? t("pages", n(file.pages)) : t("lines", n(file.text.replace(/\n$/, "").split("\n").length))}
    </span>
  );
}

/** onRemove: where the message is still being written. A sent picture says what it is when it is shown in full. */
export function Attachments({ files, onRemove }: { files: Attached[]; onRemove?: (index: number) => void }) {
  return (
    <ul class={onRemove ? "files" : "files sent"}>
      {files.map((file, index) => (
        <li key={isPicture(file) ? file.picture : index} class={isPicture(file) ? "picture" : undefined}>
          {isPicture(file) ? <Thumbnail picture={file} /> : <Icon name="file" />}
          {(onRemove || !isPicture(file)) && (
            <span class="about">
              <span class="name">{file.name}</span>
              {isPicture(file) ? <Facts picture={file} /> : <TextFacts file={file} />}
            </span>
          )}
          {onRemove && (
            <button
              type="button"
              class="quiet"
              title={t("removeFile", file.name)}
              aria-label={t("removeFile", file.name)}
              onClick={() => onRemove(index)}
            >
              <Icon name="close" />
            </button>
          )}
        </li>
      ))}
    </ul>
  );
}
