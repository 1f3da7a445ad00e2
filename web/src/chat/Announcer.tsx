// Reads an answer to screen readers: each block once it is whole, not each token.
import { useEffect, useRef } from "preact/hooks";
import type { LiveAnswer } from "../state/answer";
import { t } from "../i18n";

const MAX_SPOKEN = 2000;

export function Announcer({ live }: { live: LiveAnswer | undefined }) {
  const region = useRef<HTMLDivElement>(null);
  useEffect(() => {
    if (!live) return;
    const box = region.current!;
    box.textContent = t("answering");
    let numSpoken = live.message.peek().content.length; // what an answer goes on from was heard before
    const speakTo = (text: string) => {
      const part = text.slice(numSpoken).trim();
      if (!part) return;
      const line = document.createElement("p");
      line.textContent = part.slice(0, MAX_SPOKEN);
      if (box.childElementCount > 20) box.firstElementChild!.remove();
      box.append(line);
      numSpoken = text.length;
    };
    const stop = live.message.subscribe(({ content, state }) => {
      if (state !== "streaming") return;
      const end = content.lastIndexOf("\n\n");
      if (end > numSpoken) speakTo(content.slice(0, end));
    });
    return () => {
      stop();
      const { content, state } = live.message.peek();
      speakTo(content);
      const line = document.createElement("p");
      line.textContent = state === "stopped" ? t("stopped") : t("answered");
      box.append(line);
    };
  }, [live]);
  return <div class="sr-only" role="log" aria-live="polite" aria-relevant="additions" ref={region} />;
}
