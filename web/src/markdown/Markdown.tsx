import { useLayoutEffect, useRef } from "preact/hooks";
import { language } from "../i18n";
import { show } from "./render";
import { enqueue } from "./queue";

export function Markdown({ text }: { text: string }) {
  const box = useRef<HTMLDivElement>(null);
  const blocks = useRef<string[] | undefined>(undefined);
  const shownLanguage = useRef(language.value);
  const words = language.value; // blocks of code carry words of the page
  useLayoutEffect(() => {
    const set = () => {
      if (!blocks.current) box.current!.replaceChildren();
      blocks.current = show(box.current!, text, blocks.current ?? []);
    };
    if (blocks.current) {
      if (shownLanguage.current !== words) blocks.current = [];
      shownLanguage.current = words;
      return set();
    }
    shownLanguage.current = words;
    box.current!.textContent = text;
    return enqueue(set);
  }, [text, words]);
  return <div class="markdown" ref={box} />;
}
