// A block of code: its language, a button that copies, colours when the highlighter has been loaded.
import { t } from "../i18n";
import { icon } from "../icons";
import { copyText } from "../clipboard";

const MAX_HIGHLIGHTED = 40_000;

export function codeBlock(code: HTMLElement): HTMLElement {
  const text = code.textContent ?? "";
  const language = (code.dataset.lang ?? "").slice(0, 40);
  const box = document.createElement("figure");
  box.className = "code";
  const bar = document.createElement("figcaption");
  const name = document.createElement("span");
  name.textContent = language || t("code");
  const copy = document.createElement("button");
  copy.type = "button";
  copy.className = "quiet";
  const label = document.createElement("span");
  label.textContent = t("copy");
  copy.append(icon("copy"), label);
  copy.addEventListener("click", () => {
    void copyText(text).then((isDone) => {
      label.textContent = isDone ? t("copied") : t("copyFailed");
      setTimeout(() => (label.textContent = t("copy")), 1500);
    });
  });
  bar.append(name, copy);
  const pre = document.createElement("pre");
  pre.tabIndex = 0;
  pre.role = "group";
  pre.ariaLabel = t("code");
  pre.append(code);
  box.append(bar, pre);
  if (language && text.length <= MAX_HIGHLIGHTED) void import("./highlight").then(({ highlight }) => highlight(code, language));
  return box;
}
