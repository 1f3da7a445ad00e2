// Files that are dropped, pasted or picked: the texts or pictures they hold, or why not.
import { t, type Key } from "../i18n";
import type { Attached, TextFile } from "../storage/types";
import { decode } from "./decode";
import { pictureType, readPicture } from "./pictures";

const MAX_TEXT = 1 << 20; // bytes of a text file, characters of a PDF's text
const MAX_PDF = 32 << 20;

export interface Refusal {
  name: string;
  reason: Key;
}

/** Takes the bytes of a picture into the store. */
type Keep = (blob: Blob) => Promise<string>;

async function readOne(file: File, keep: Keep | undefined): Promise<Attached | Refusal> {
  const { name } = file;
  try {
    const start = new Uint8Array(await file.slice(0, 1024).arrayBuffer());
    const type = pictureType(start);
    if (type) return keep ? await readPicture(file, type, keep) : { name, reason: "textOnly" };
    const head = new TextDecoder("latin1").decode(start);
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

/** In the order of the list, one after the other: a decoded photo is large. Without `keep` pictures are refused. */
export async function readFiles(list: Iterable<File>, keep?: Keep): Promise<{ files: Attached[]; refused: Refusal[] }> {
  const files: Attached[] = [];
  const refused: Refusal[] = [];
  for (const file of list) {
    const read = await readOne(file, keep);
    if ("reason" in read) refused.push(read);
    else files.push(read);
  }
  return { files, refused };
}

/** One text that names each of them, in a line of its own; the reason that is the model's has one line for all. */
export function refusalText(refused: Refusal[]): string {
  const byReason = new Map<Key, string[]>();
  for (const { name, reason } of refused) byReason.set(reason, [...(byReason.get(reason) ?? []), name]);
  const lines = ([reason, names]: [Key, string[]]) =>
    reason === "textOnly" ? t(reason, names.join(", ")) : names.map((name) => t(reason, name)).join("\n");
  return [...byReason].map(lines).join("\n");
}
