// Emphasis beside Chinese, Japanese and Korean text, which has no spaces: CommonMark takes `**note:**text` for no emphasis
// where punctuation stands inside of the marks and a letter outside. https://github.com/tats-u/markdown-cjk-friendly has
// the rules that mend it, which other programs follow too.
import type { MarkdownIt } from "markdown-it";

const CJK =
  /[\p{Script=Han}\p{Script=Hangul}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Bopomofo}\p{Script=Yi}\u3000-\u303f\u30fb-\u30ff\u3200-\u33ff\ufe10-\ufe1f\ufe30-\ufe6f\uff01-\uffee]/u;

interface Side {
  isSpace: boolean;
  isPunctuation: boolean;
  isCjk: boolean;
}

export function addCjkEmphasis(md: MarkdownIt): void {
  const { isMdAsciiPunct, isPunctCharCode, isWhiteSpace } = md.utils;
  const sideOf = (char: string | undefined): Side => {
    const code = char?.codePointAt(0) ?? 32; // the ends of the text count as spaces
    return {
      isSpace: isWhiteSpace(code),
      isPunctuation: isMdAsciiPunct(code) || isPunctCharCode(code),
      isCjk: CJK.test(char ?? ""),
    };
  };
  const isFlanking = (inner: Side, outer: Side) =>
    !inner.isSpace && (!inner.isPunctuation || inner.isCjk || outer.isSpace || outer.isPunctuation || outer.isCjk);

  md.inline.State = class extends md.inline.State {
    override scanDelims(start: number, canSplitWord: boolean) {
      const scanned = super.scanDelims(start, canSplitWord);
      const end = start + scanned.length;
      const before = sideOf([...this.src.slice(Math.max(0, start - 2), start)].at(-1));
      const after = sideOf(end < this.posMax ? String.fromCodePoint(this.src.codePointAt(end)!) : undefined);
      if (!before.isCjk && !after.isCjk) return scanned;
      const [isLeft, isRight] = [isFlanking(after, before), isFlanking(before, after)];
      return {
        can_open: isLeft && (canSplitWord || !isRight || before.isPunctuation),
        can_close: isRight && (canSplitWord || !isLeft || after.isPunctuation),
        length: scanned.length,
      };
    }
  };
}
