// Formulas, loaded when the first one is shown. KaTeX builds DOM nodes, so the page's policy on inline styles holds.
import katex from "katex";
import "katex/dist/katex.min.css";
import { t } from "../i18n";

const MAX_TEX = 20_000;

export function renderFormula(place: HTMLElement): void {
  const tex = place.dataset.tex ?? "";
  const isDisplay = place.dataset.display !== undefined;
  if (tex.length > MAX_TEX) return;
  try {
    katex.render(tex, place, {
      displayMode: isDisplay,
      throwOnError: true,
      strict: "ignore",
      trust: false,
      maxExpand: 500,
      maxSize: 20,
    });
    place.classList.add(isDisplay ? "formula-block" : "formula");
    if (!isDisplay) return;
    place.tabIndex = 0; // a wide one scrolls
    place.role = "group";
    place.ariaLabel = t("formula");
  } catch {
    place.textContent = isDisplay ? `$$${tex}$$` : `$${tex}$`; // not TeX (yet): as it was written
    place.classList.add("formula-raw");
  }
}
