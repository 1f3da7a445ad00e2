// Bytes of a text file to text, for the encodings that people have such files in.
import type { TextFile } from "../storage/types";

type Read = Pick<TextFile, "text" | "encoding">;

/** Control characters that no text has: what holds one is something else. Tab, line ends, form feed, Escape are text. */
function isBinary(bytes: Uint8Array): boolean {
  return bytes.some((byte) => (byte < 32 && !(byte >= 9 && byte <= 13) && byte !== 27) || byte === 127);
}

function decoded(bytes: Uint8Array, encoding: string): string | undefined {
  try {
    return new TextDecoder(encoding, { fatal: true }).decode(bytes);
  } catch {
    return undefined;
  }
}

function utf16(bytes: Uint8Array): Read | undefined {
  const isLittle = bytes[0] === 0xff && bytes[1] === 0xfe;
  if (!isLittle && !(bytes[0] === 0xfe && bytes[1] === 0xff)) return undefined;
  const text = decoded(bytes, isLittle ? "utf-16le" : "utf-16be");
  return text === undefined || text.includes("\0") ? undefined : { text, encoding: "UTF-16" };
}

/**
 * Whether bytes that are no UTF-8 look like Chinese in GBK: its characters are pairs, so that runs of bytes above 127 have
 * even lengths but where a second byte is below; in Latin texts most of them stand alone.
 */
function looksLikeGbk(bytes: Uint8Array): boolean {
  let [numEven, numRuns, length] = [0, 0, 0];
  for (let at = 0; at <= bytes.length; at += 1) {
    if ((bytes[at] ?? 0) > 127) length += 1;
    else if (length) {
      numRuns += 1;
      numEven += Number(length % 2 === 0);
      length = 0;
    }
  }
  return numEven > 0.7 * numRuns;
}

function gbk(bytes: Uint8Array): Read | undefined {
  const text = looksLikeGbk(bytes) ? decoded(bytes, "gb18030") : undefined;
  if (!text) return undefined;
  const foreign = text.match(/[^\0-\x7f]/gu) ?? [];
  const chinese = foreign.filter((one) => /[\p{Script=Han}\u3000-\u303f\uff00-\uffef\u2010-\u2026]/u.test(one));
  return chinese.length > 0.9 * foreign.length ? { text, encoding: "GB18030" } : undefined;
}

/** Bytes that Windows-1252 has no character for. */
const UNDEFINED = new Set([0x81, 0x8d, 0x8f, 0x90, 0x9d]);

/** The text; undefined where the bytes are none. `encoding` is missing for UTF-8, and a guess for what no mark says. */
export function decode(bytes: Uint8Array): Read | undefined {
  const marked = utf16(bytes);
  if (marked) return marked;
  const text = decoded(bytes, "utf-8");
  if (text !== undefined) return text.includes("\0") ? undefined : { text };
  if (isBinary(bytes)) return undefined;
  const chinese = gbk(bytes);
  if (chinese) return chinese;
  if (bytes.some((byte) => UNDEFINED.has(byte))) return undefined;
  const western = decoded(bytes, "windows-1252");
  return western === undefined ? undefined : { text: western, encoding: "Windows-1252" };
}
