// Pictures that are attached: which files are some, how large they are, and smaller ones of those too large to send.
import type { Picture, PictureFacts } from "../storage/types";
import type { Refusal } from "./read";

/** Of what is sent: pixels a side, and bytes. */
const MAX_SIDE = 4096;
const MAX_SIZE = 20_000_000;
/** Of what is decoded. */
const MAX_FILE = 200_000_000;
/** What is sent as it is; what else the browser can decode becomes one of these. */
const SENT = ["image/png", "image/jpeg", "image/webp", "image/gif"];
/** Types without loss, screenshots say: they become PNG, others JPEG. */
const EXACT = ["image/png", "image/gif", "image/bmp"];
const QUALITY = 0.92;

const KINDS: [RegExp, string][] = [
  [/^\x89PNG\r\n\x1a\n/, "image/png"],
  [/^\xff\xd8\xff/, "image/jpeg"],
  [/^GIF8[79]a/, "image/gif"],
  [/^RIFF[^]{4}WEBP/, "image/webp"],
  [/^BM[^]{4}\0{4}/, "image/bmp"],
  [/^[^]{4}ftypavi[fs]/, "image/avif"],
  [/^[^]{4}ftyp(?:hei[cx]|hev[cx]|mif1)/, "image/heic"],
  [/^(?:II\*\0|MM\0\*)/, "image/tiff"],
];

/** By the first bytes; "" where they are no picture's. */
export function pictureType(data: Uint8Array): string {
  const head = String.fromCharCode(...data.subarray(0, 16));
  return KINDS.find(([pattern]) => pattern.test(head))?.[1] ?? "";
}

/** Upright, within both bounds. */
async function smaller(bitmap: ImageBitmap, from: PictureFacts): Promise<{ blob: Blob; facts: PictureFacts }> {
  const type = EXACT.includes(from.type) ? "image/png" : "image/jpeg";
  const canvas = document.createElement("canvas");
  let scale = Math.min(1, MAX_SIDE / Math.max(from.width, from.height));
  for (;;) {
    const [width, height] = [from.width, from.height].map((side) => Math.max(1, Math.round(side * scale))) as [number, number];
    Object.assign(canvas, { width, height });
    const context = canvas.getContext("2d", { alpha: type === "image/png" })!;
    context.imageSmoothingQuality = "high";
    if (type === "image/jpeg") {
      context.fillStyle = "#fff"; // behind what is transparent
      context.fillRect(0, 0, width, height);
    }
    context.drawImage(bitmap, 0, 0, width, height);
    const blob = await new Promise<Blob | null>((done) => canvas.toBlob(done, type, QUALITY));
    if (!blob) throw new Error("the browser cannot make a picture of this size");
    if (blob.size <= MAX_SIZE) return { blob, facts: { type, width, height, size: blob.size } };
    scale *= 0.95 * Math.sqrt(MAX_SIZE / blob.size);
  }
}

/** Gives the bytes to `keep`, which answers with their id. */
export async function readPicture(file: File, type: string, keep: (blob: Blob) => Promise<string>): Promise<Picture | Refusal> {
  const { name, size } = file;
  if (size > MAX_FILE) return { name, reason: "pictureTooLarge" };
  const given = new Blob([await file.arrayBuffer()], { type });
  try {
    const bitmap = await createImageBitmap(given);
    const from = { type, width: bitmap.width, height: bitmap.height, size };
    const isSent = SENT.includes(type) && size <= MAX_SIZE && Math.max(from.width, from.height) <= MAX_SIDE;
    const made = isSent ? undefined : await smaller(bitmap, from);
    bitmap.close();
    return { picture: await keep(made?.blob ?? given), name, ...(made ? { ...made.facts, from } : from) };
  } catch {
    return { name, reason: "pictureBroken" };
  }
}

/** The bytes, as requests and exported files have them. */
export function dataUrl(blob: Blob): Promise<string> {
  return new Promise((done, refuse) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result as string);
    reader.onerror = () => refuse(reader.error);
    reader.readAsDataURL(blob);
  });
}

/** The reverse; undefined for what is no picture that can be sent. */
export function fromDataUrl(url: string): Blob | undefined {
  const [head, base64] = url.split(",", 2);
  if (!head?.startsWith("data:") || !head.endsWith(";base64")) return undefined;
  try {
    const bytes = Uint8Array.from(atob(base64 ?? ""), (one) => one.charCodeAt(0));
    const type = pictureType(bytes);
    return SENT.includes(type) ? new Blob([bytes], { type }) : undefined;
  } catch {
    return undefined; // no base64
  }
}
