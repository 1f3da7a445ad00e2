// The text of a PDF, by PDF.js: loaded with the first one, run in a worker, which ends with the file.
import { getDocument, PasswordException, PDFWorker, type PDFDocumentProxy } from "pdfjs-dist/legacy/build/pdf.mjs";
import workerUrl from "pdfjs-dist/legacy/build/pdf.worker.min.mjs?url";
import type { Key } from "../i18n";

/** Beside this script, as built; see vite.config.ts. */
const CMAPS = new URL(/* @vite-ignore */ "./cmaps/", import.meta.url).href;
const MAX_SECONDS = 60;
const MAX_PAGES = 5000;
/** What fonts without a table of characters leave. */
const NO_TEXT = /[\0-\x08\x0b\x0e-\x1f\x7f]/g;

/** The page's policy lets no text become a script's address but this one. */
const policy = (
  globalThis as { trustedTypes?: { createPolicy(name: string, rules: { createScriptURL(url: string): string }): { createScriptURL(url: string): string } } }
).trustedTypes?.createPolicy("ktransformers-pdf", {
  createScriptURL: (url) => {
    if (url !== workerUrl) throw new TypeError("not the worker of PDF.js");
    return url;
  },
});

function newWorker(): Worker {
  return new Worker(policy?.createScriptURL(workerUrl) ?? workerUrl, { type: "module" });
}

async function pageText(document: PDFDocumentProxy, number: number): Promise<string> {
  const page = await document.getPage(number);
  const { items } = await page.getTextContent();
  page.cleanup();
  return items.map((item) => ("str" in item ? item.str + (item.hasEOL ? "\n" : "") : "")).join("").replace(NO_TEXT, "\ufffd").trim();
}

async function textOf(document: PDFDocumentProxy): Promise<string> {
  const pages: string[] = [];
  for (let number = 1; number <= Math.min(document.numPages, MAX_PAGES); number += 1) pages.push(await pageText(document, number));
  return pages.filter(Boolean).join("\n\n");
}

/** The text, with an empty line between pages; or why there is none. */
export async function textOfPdf(data: Uint8Array): Promise<{ text: string; pages: number } | Key> {
  const port = newWorker();
  const worker = PDFWorker.create({ port });
  const task = getDocument({
    data, worker, cMapUrl: CMAPS, cMapPacked: true, useSystemFonts: false, disableFontFace: true, verbosity: 0,
  }); // prettier-ignore
  const late = new Promise<never>((_, refuse) => setTimeout(() => refuse(new Error("late")), MAX_SECONDS * 1000));
  try {
    const document = await Promise.race([task.promise, late]);
    const text = await Promise.race([textOf(document), late]);
    return text ? { text, pages: document.numPages } : "pdfEmpty";
  } catch (error) {
    return error instanceof PasswordException ? "pdfLocked" : "pdfBroken";
  } finally {
    worker.destroy();
    port.terminate();
  }
}
