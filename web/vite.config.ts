import { createHash } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";
import { defineConfig, type Plugin } from "vite";

/** Every browser that this page supports reads woff2: the other forms of KaTeX's fonts stay behind. */
const woff2Only: Plugin = {
  name: "woff2-only",
  enforce: "pre",
  transform(code, id) {
    if (!id.includes("katex.min.css")) return null;
    return code.replace(/,\s*url\([^)]+\.(?:woff|ttf)\)\s*format\(['"][^'"]+['"]\)/g, "");
  },
};

/** The tables that PDF.js needs for Chinese, Japanese and Korean fonts which are not embedded, but for the rarest. */
const cmaps: Plugin = {
  name: "cmaps",
  generateBundle() {
    const folder = "node_modules/pdfjs-dist/cmaps";
    const wanted = /^(?:LICENSE|[HV]\.bcmap|(?:Adobe-.*-UCS2|Uni.*-(?:UCS2|UTF16)-[HV]|GB.*|(?:EUC|ETen.*|B5pc|KSC.*|.*RKSJ)-[HV])\.bcmap)$/;
    for (const name of readdirSync(folder).filter((one) => wanted.test(one))) {
      this.emitFile({ type: "asset", fileName: `page/cmaps/${name}`, source: readFileSync(`${folder}/${name}`) });
    }
  },
};

/** The code that a package has taken over from another one, and the text that goes with it. */
const WITHIN = [["core-js 3.51.0 (in pdfjs-dist)", "src/files/core-js.LICENSE.txt"]] as const;

/** The licenses of what is built in go with it. */
const licenses: Plugin = {
  name: "licenses",
  generateBundle() {
    const lock = JSON.parse(readFileSync("package-lock.json", "utf8")) as { packages: Record<string, { version: string; dev?: boolean; optional?: boolean }> };
    const shipped = Object.entries(lock.packages).filter(([path, entry]) => path && !entry.dev && !entry.optional);
    const texts = shipped.flatMap(([path, { version }]) => {
      const found = readdirSync(path).find((name) => /^licen[cs]e/i.test(name));
      const name = path.replace(/^.*node_modules\//, "");
      return found ? [`${name} ${version}\n\n${readFileSync(`${path}/${found}`, "utf8").trim()}\n`] : [];
    });
    for (const [name, path] of WITHIN) texts.push(`${name}\n\n${readFileSync(path, "utf8").trim()}\n`);
    this.emitFile({ type: "asset", fileName: "page/LICENSES.txt", source: texts.join(`\n${"-".repeat(80)}\n\n`) });
  },
};

/** What the page was built from: a test without node sees whether somebody forgot `make web`. */
const sources: Plugin = {
  name: "sources",
  generateBundle() {
    const inSrc = readdirSync("src", { recursive: true, withFileTypes: true }).filter((entry) => entry.isFile());
    const names = inSrc.map((entry) => `${entry.parentPath}/${entry.name}`);
    const hash = createHash("sha256");
    for (const name of [...names, "index.html", "package-lock.json", "package.json", "tsconfig.json", "vite.config.ts"].sort()) {
      hash.update(`${name}\0`).update(readFileSync(name)).update("\0");
    }
    this.emitFile({ type: "asset", fileName: "page/sources.sha256", source: `${hash.digest("hex")}\n` });
  },
};

// File names carry no hash: the server sends an ETag, and the built files are committed.
export default defineConfig({
  base: "./",
  plugins: [woff2Only, cmaps, licenses, sources],
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: {
    target: "es2022",
    outDir: "../ktransformers/assets/web",
    emptyOutDir: true,
    assetsDir: "page",
    assetsInlineLimit: 0,
    modulePreload: false,
    reportCompressedSize: false,
    rollupOptions: {
      output: {
        entryFileNames: "page/app.js",
        chunkFileNames: "page/[name].js",
        assetFileNames: "page/[name][extname]",
      },
    },
  },
  server: { proxy: Object.fromEntries(["/v1", "/ready", "/server_info"].map((path) => [path, "http://127.0.0.1:10002"])) },
});
