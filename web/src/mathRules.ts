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
  const to = endOf(src, close, from);
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
  let line = startLine;
  let text = first.slice(2);
  while (!text.trimEnd().endsWith(close)) {
    line += 1;
    if (line >= endLine || state.isEmpty(line)) return false; // not closed in this paragraph: the text is shown
    text += "\n" + state.src.slice(state.bMarks[line]! + state.tShift[line]!, state.eMarks[line]);
  }
  const formula = text.trimEnd().slice(0, -2);
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
