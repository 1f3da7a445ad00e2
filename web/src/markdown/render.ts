// An answer's text to DOM, block by block: while it streams only blocks that changed are made anew.
//
// Nothing that a model writes becomes markup by itself: markdown-it escapes HTML, the sanitizer takes what is left
// through a short list, and links, code and formulas are finished here with DOM calls.
import DOMPurify, { type Config } from "dompurify";
import MarkdownIt, { type Token } from "markdown-it";
import { codeBlock } from "./code";
import { t } from "../i18n";
import { addBreaks } from "./breaks";
import { addCjkEmphasis } from "./cjk";
import { addTasks, showTasks } from "./tasks";
import { addMath } from "./mathRules";

const ALLOWED_URI = /^(?:https?:\/\/|mailto:)/i;
const SANITIZER: Config & { RETURN_DOM_FRAGMENT: true } = {
  ALLOWED_TAGS: (
    "a b blockquote br code del em h1 h2 h3 h4 h5 h6 hr i li ol p pre s span strong sub sup table tbody td th thead tr ul"
  ).split(" "),
  ALLOWED_ATTR: ["href", "title", "start", "data-align", "data-lang", "data-tex", "data-display", "data-task"],
  ALLOWED_URI_REGEXP: ALLOWED_URI, // for every attribute that is not named in the next line
  ADD_URI_SAFE_ATTR: ["title", "start", "data-align", "data-lang", "data-tex", "data-display", "data-task"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const md = new MarkdownIt({ html: false, linkify: true, typographer: false, breaks: true });
md.validateLink = (url) => ALLOWED_URI.test(url.trim());
md.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
for (const rules of [addMath, addBreaks, addCjkEmphasis, addTasks]) md.use(rules);

// A picture would be a request to wherever the model says: it stays a link.
md.renderer.rules.image = (tokens, index) => {
  const token = tokens[index]!;
  const url = String(token.attrGet("src") ?? "");
  const text = md.utils.escapeHtml(token.content || url);
  return ALLOWED_URI.test(url) ? `<a href="${md.utils.escapeHtml(url)}">${text}</a>` : text;
};
md.renderer.rules.fence = (tokens, index) => {
  const token = tokens[index]!;
  const language = token.info.trim().split(/\s+/)[0] ?? "";
  return `<pre><code data-lang="${md.utils.escapeHtml(language)}">${md.utils.escapeHtml(token.content)}</code></pre>`;
};
md.renderer.rules.code_block = (tokens, index) =>
  `<pre><code data-lang="">${md.utils.escapeHtml(tokens[index]!.content)}</code></pre>`;
for (const cell of ["th_open", "td_open"]) {
  md.renderer.rules[cell] = (tokens, index) => {
    const align = /text-align:(\w+)/.exec(String(tokens[index]!.attrGet("style") ?? ""))?.[1];
    return `<${tokens[index]!.tag}${align ? ` data-align="${align}"` : ""}>`;
  };
}

/** The HTML of each block on the outermost level. */
export function blocksOf(text: string): string[] {
  const env = {};
  const tokens = md.parse(text, env);
  const blocks: string[] = [];
  let group: Token[] = [];
  let depth = 0;
  for (const token of tokens) {
    group.push(token);
    depth += token.nesting;
    if (depth > 0) continue;
    blocks.push(md.renderer.render(group, md.options, env));
    group = [];
  }
  return blocks;
}

let math: Promise<typeof import("./math")> | undefined;

function finish(fragment: DocumentFragment): void {
  for (const link of fragment.querySelectorAll("a")) {
    if (!link.hasAttribute("href")) link.replaceWith(...link.childNodes);
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const code of fragment.querySelectorAll<HTMLElement>("pre > code")) code.parentElement!.replaceWith(codeBlock(code));
  showTasks(fragment);
  for (const table of fragment.querySelectorAll("table")) {
    const box = document.createElement("div");
    box.className = "table-box";
    box.tabIndex = 0; // scrolls sideways, by keyboard too
    box.role = "group";
    box.ariaLabel = t("table");
    table.replaceWith(box);
    box.append(table);
  }
  const formulas = fragment.querySelectorAll<HTMLElement>("[data-tex]");
  if (!formulas.length) return;
  // Each import() looks through the whole document for its style sheet: one is enough.
  math ??= import("./math");
  void math.then(({ renderFormula }) => formulas.forEach(renderFormula));
}

const MAX_RENDERED = 400_000; // characters; beyond them an answer is shown as it is

/** Makes `container` show this text. Returns the elements of its blocks. */
export function show(container: HTMLElement, text: string, previous: string[]): string[] {
  if (text.length > MAX_RENDERED) {
    container.replaceChildren();
    const plain = document.createElement("p");
    plain.className = "plain";
    plain.textContent = text;
    container.append(plain);
    return [text];
  }
  const blocks = blocksOf(text);
  let same = 0;
  while (same < blocks.length && blocks[same] === previous[same]) same += 1;
  while (container.children.length > same) container.lastElementChild!.remove();
  for (const html of blocks.slice(same)) {
    const box = document.createElement("div");
    box.className = "block";
    const fragment = DOMPurify.sanitize(html, SANITIZER);
    finish(fragment);
    box.append(fragment);
    container.append(box);
  }
  return blocks;
}
