// Files that are dropped, pasted or picked: the texts they hold, or why not.
import { t, type Key } from "../i18n";
import type { TextFile } from "../storage/types";
import { decode } from "./decode";

const MAX_TEXT = 1 << 20; // bytes of a text file, characters of a PDF's text
const MAX_PDF = 32 << 20;

export interface Refusal {
  name: string;
  reason: Key;
}

async function readOne(file: File): Promise<TextFile | Refusal> {
  const { name } = file;
  try {
    const head = new TextDecoder("latin1").decode(await file.slice(0, 1024).arrayBuffer());
    if (head.includes("%PDF-")) return file.size > MAX_PDF ? { name, reason: "pdfTooLarge" } : await readPdf(file);
    if (file.size > MAX_TEXT) return { name, reason: "tooLarge" };
    const read = decode(new Uint8Array(await file.arrayBuffer()));
    return read ? { name, ...read } : { name, reason: "notText" };
  } catch {
    return { name, reason: "notRead" }; // a folder, or a file that is gone
  }
}

async function readPdf(file: File): Promise<TextFile | Refusal> {
  const { name } = file;
  const { textOfPdf } = await import("./pdf");
  const read = await textOfPdf(new Uint8Array(await file.arrayBuffer()));
  if (typeof read === "string") return { name, reason: read };
  return read.text.length > MAX_TEXT ? { name, reason: "pdfTooLong" } : { name, encoding: "PDF", ...read };
}

/** In the order of the list. */
export async function readFiles(list: Iterable<File>): Promise<{ files: TextFile[]; refused: Refusal[] }> {
  const read = await Promise.all([...list].map(readOne));
  return {
    files: read.filter((one): one is TextFile => "text" in one),
    refused: read.filter((one): one is Refusal => "reason" in one),
  };
}

/** One text that names each of them, a line for each reason. */
export function refusalText(refused: Refusal[]): string {
  const byReason = new Map<Key, string[]>();
  for (const { name, reason } of refused) byReason.set(reason, [...(byReason.get(reason) ?? []), name]);
  return [...byReason].map(([reason, names]) => names.map((name) => t(reason, name)).join("\n")).join("\n");
}
