// Lists of tasks: `- [ ] open`, `- [x] done`. The boxes are shown, not clicked.
import type { MarkdownIt, StateCore } from "markdown-it";
import { t } from "../i18n";

const TASK = /^\[([ xX])\]\s+(?=\S)/;

function findTasks(state: StateCore): void {
  state.tokens.forEach((token, at) => {
    const first = token.children?.[0];
    const begins = state.tokens[at - 1]?.type === "paragraph_open" && state.tokens[at - 2]?.type === "list_item_open";
    if (token.type !== "inline" || !begins || first?.type !== "text") return;
    // What follows may be a mark of its own: `- [x] **done**`.
    const found = /^\[[ xX]\]\s+$/.test(first.content) && token.children!.length > 1 ? first.content : TASK.exec(first.content)?.[0];
    if (!found) return;
    first.content = first.content.slice(found.length);
    const box = new state.Token("task", "span", 0);
    box.meta = { isDone: found[1] !== " " };
    token.children!.unshift(box);
  });
}

export function addTasks(md: MarkdownIt): void {
  md.core.ruler.push("tasks", findTasks);
  md.renderer.rules.task = (tokens, index) => `<span data-task="${tokens[index]!.meta?.isDone ? "done" : "open"}"></span>`;
}

/** Puts boxes where `findTasks` has left their places. */
export function showTasks(fragment: DocumentFragment): void {
  for (const place of fragment.querySelectorAll<HTMLElement>("[data-task]")) {
    const isDone = place.dataset.task === "done";
    const box = document.createElement("input");
    box.type = "checkbox";
    box.disabled = true;
    box.checked = isDone;
    box.ariaLabel = t(isDone ? "taskDone" : "taskOpen");
    place.closest("li")?.classList.add("task");
    place.replaceWith(box);
  }
}
