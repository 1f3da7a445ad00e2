import { useLayoutEffect, useRef } from "preact/hooks";
import { language } from "./i18n";
import { show } from "./markdown";

export function Markdown({ text }: { text: string }) {
  const box = useRef<HTMLDivElement>(null);
  const blocks = useRef<string[]>([]);
  const shownLanguage = useRef(language.value);
  const words = language.value; // blocks of code carry words of the page
  useLayoutEffect(() => {
    if (shownLanguage.current !== words) blocks.current = [];
    shownLanguage.current = words;
    blocks.current = show(box.current!, text, blocks.current);
  }, [text, words]);
  return <div class="markdown" ref={box} />;
}
