// `<br>`: the one HTML tag that is read, since cells of a table have no other way to a new line.
import type { MarkdownIt, StateInline } from "markdown-it";

const BREAK = /<br\s{0,9}\/?>/iy;

function lineBreak(state: StateInline, isSilent: boolean): boolean {
  BREAK.lastIndex = state.pos;
  const found = BREAK.exec(state.src)?.[0];
  if (!found || state.pos + found.length > state.posMax) return false;
  if (!isSilent) state.push("hardbreak", "br", 0);
  state.pos += found.length;
  return true;
}

export function addBreaks(md: MarkdownIt): void {
  md.inline.ruler.before("autolink", "break", lineBreak);
}
