// Where formulas stand in markdown: $...$, $$...$$, \(...\), \[...\]. They become spans that math.ts fills.
import type { MarkdownIt, StateBlock, StateInline } from "markdown-it";

function escapes(src: string, at: number): boolean {
  let count = 0;
  while (src[at - 1 - count] === "\\") count += 1;
  return count % 2 === 1;
}

function endOf(src: string, mark: string, from: number): number {
  let at = src.indexOf(mark, from);
  while (at >= 0 && mark[0] === "$" && escapes(src, at)) at = src.indexOf(mark, at + 1);
  return at;
}

/** As pandoc has it: no space inside of the dollars, no digit after them, so that "$5 and $6" stays text. */
function isDollarPair(src: string, from: number, to: number): boolean {
  return !/\s/.test(src[from]!) && !/\s/.test(src[to - 1]!) && !/\d/.test(src[to + 1] ?? "");
}

/** The last text that has no `mark` from some place on: else a text of unclosed formulas takes quadratic time. */
const missing = new Map<string, { src: string; from: number }>();

function closeOf(src: string, mark: string, from: number): number {
  const known = missing.get(mark);
  if (known && known.src === src && from >= known.from) return -1;
  const at = endOf(src, mark, from);
  if (at < 0) missing.set(mark, { src, from });
  return at;
}

const MAX_LINES = 200; // of a formula

const PAIRS: [string, string, boolean][] = [
  ["$$", "$$", true],
  ["\\[", "\\]", true],
  ["\\(", "\\)", false],
  ["$", "$", false],
];

function inline(state: StateInline, isSilent: boolean): boolean {
  const { src, pos } = state;
  const pair = PAIRS.find(([open]) => src.startsWith(open, pos));
  if (!pair) return false;
  const [open, close, isDisplay] = pair;
  const from = pos + open.length;
  const to = closeOf(src, close, from);
  if (to <= from || to > state.posMax - close.length || (open === "$" && !isDollarPair(src, from, to))) return false;
  if (!isSilent) {
    const token = state.push("formula", "span", 0);
    token.content = src.slice(from, to);
    token.meta = { isDisplay };
  }
  state.pos = to + close.length;
  return true;
}

function block(state: StateBlock, startLine: number, endLine: number, isSilent: boolean): boolean {
  const start = state.bMarks[startLine]! + state.tShift[startLine]!;
  const first = state.src.slice(start, state.eMarks[startLine]);
  const open = ["$$", "\\["].find((mark) => first.startsWith(mark));
  if (!open || state.sCount[startLine]! - state.blkIndent >= 4) return false;
  const close = open === "$$" ? "$$" : "\\]";
  const lastLine = Math.min(endLine, startLine + MAX_LINES);
  let line = startLine;
  const lines = [first.slice(2)];
  while (!lines.at(-1)!.trimEnd().endsWith(close)) {
    line += 1;
    if (line >= lastLine || state.isEmpty(line)) return false; // not closed in this paragraph: the text is shown
    lines.push(state.src.slice(state.bMarks[line]! + state.tShift[line]!, state.eMarks[line]));
  }
  const formula = lines.join("\n").trimEnd().slice(0, -2);
  if (formula.includes(close)) return false;
  if (isSilent) return true;
  const token = state.push("formula", "span", 0);
  token.content = formula;
  token.meta = { isDisplay: true };
  token.map = [startLine, line + 1];
  state.line = line + 1;
  return true;
}

export function addMath(md: MarkdownIt): void {
  md.inline.ruler.before("escape", "formula", inline);
  md.block.ruler.before("fence", "formula", block, { alt: ["paragraph", "blockquote", "list"] });
  md.renderer.rules.formula = (tokens, index) => {
    const { content, meta } = tokens[index]!;
    const tex = md.utils.escapeHtml(content);
    return `<span data-tex="${tex}"${meta?.isDisplay ? ' data-display="1"' : ""}>${tex}</span>`;
  };
}
