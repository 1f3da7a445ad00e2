// How often each expert was chosen: a row for each layer, darker is more often.
import { useSignal } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import type { Figures } from "./figures";
import { n, t } from "../i18n";
import { theme } from "../state/state";

type Experts = NonNullable<Figures["experts"]>;
type Place = { row: number; expert: number };

const mean = (counts: number[]) => counts.reduce((sum, count) => sum + count, 0) / counts.length;

/** From 0 (never) to 1: four times the layer's mean, or more. */
function heatOf(count: number, layerMean: number): number {
  return layerMean ? Math.min(1, Math.sqrt(count / layerMean / 4)) : 0;
}

/** Red, green and blue of the legend's steps: the theme's colours, as the browser resolves them. */
function colours(ramp: HTMLElement): number[][] {
  return [...ramp.children].map((step) => getComputedStyle(step).color.match(/\d+/g)!.slice(0, 3).map(Number));
}

function draw(canvas: HTMLCanvasElement, ramp: number[][], experts: Experts, cell: number, marked: Place | undefined): void {
  const context = canvas.getContext("2d")!;
  const gap = cell > 4 ? 1 : 0;
  canvas.width = Math.max(...experts.counts.map((counts) => counts.length)) * cell;
  canvas.height = experts.counts.length * cell;
  experts.counts.forEach((counts, row) => {
    const layerMean = mean(counts);
    counts.forEach((count, expert) => {
      const heat = heatOf(count, layerMean) * 2;
      const [from, to] = heat < 1 ? [ramp[0]!, ramp[1]!] : [ramp[1]!, ramp[2]!];
      const share = heat < 1 ? heat : heat - 1;
      context.fillStyle = `rgb(${from.map((low, i) => Math.round(low + (to[i]! - low) * share)).join(" ")})`;
      context.fillRect(expert * cell, row * cell, cell - gap, cell - gap);
    });
  });
  if (!marked) return;
  context.lineWidth = 2;
  context.strokeStyle = getComputedStyle(canvas).color;
  context.strokeRect(marked.expert * cell, marked.row * cell, cell - gap, cell - gap);
}

function mostUsed({ counts }: Experts): Place {
  let best: Place = { row: 0, expert: 0 };
  counts.forEach((row, at) =>
    row.forEach((count, expert) => {
      if (count > counts[best.row]![best.expert]!) best = { row: at, expert };
    }),
  );
  return best;
}

const STEPS: Record<string, [number, number]> = {
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
};

export function HeatMap({ experts }: { experts: Experts }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const ramp = useRef<HTMLSpanElement>(null);
  const marked = useSignal<Place | undefined>(undefined);
  const width = useSignal(0);
  const numExperts = Math.max(...experts.counts.map((counts) => counts.length));
  const cell = Math.max(2, Math.min(18, Math.floor(width.value / numExperts)));
  const best = mostUsed(experts);
  const scheme = theme.value;
  useLayoutEffect(() => {
    const box = canvas.current!.parentElement!;
    const watch = new ResizeObserver(() => (width.value = box.clientWidth));
    watch.observe(box);
    return () => watch.disconnect();
  }, []);
  useLayoutEffect(() => draw(canvas.current!, colours(ramp.current!), experts, cell, marked.value), [experts, cell, marked.value, scheme]);

  const mark = (row: number, expert: number) => {
    const counts = experts.counts[row];
    if (counts && expert >= 0 && expert < counts.length) marked.value = { row, expert };
  };
  const at = marked.value;
  const counts = at && experts.counts[at.row];
  const count = counts?.[at!.expert];
  return (
    <section class="card">
      <h2>{t("experts")}</h2>
      <div class="heat-box">
        <canvas
          ref={canvas}
          role="img"
          tabIndex={0}
          aria-label={t("expertsLabel", experts.layers.length, numExperts, best.expert, experts.layers[best.row]!)}
          onPointerMove={(event) => {
            const box = event.currentTarget.getBoundingClientRect();
            const expert = Math.floor(((event.clientX - box.left) / box.width) * numExperts);
            mark(Math.floor(((event.clientY - box.top) / box.height) * experts.layers.length), expert);
          }}
          onPointerLeave={() => (marked.value = undefined)}
          onBlur={() => (marked.value = undefined)}
          onKeyDown={(event) => {
            const step = STEPS[event.key];
            if (!step) return;
            event.preventDefault();
            const from = marked.value ?? { row: 0, expert: -step[1] };
            mark(from.row + (marked.value ? step[0] : 0), from.expert + step[1]);
          }}
        />
      </div>
      <div class="heat-foot">
        <p class="hint" aria-live="polite">
          {count === undefined
            ? t("expertsHint")
            : t("expertAt", experts.layers[at!.row]!, at!.expert, n(count), n(count / (mean(counts!) || 1), 1))}
        </p>
        <p class="legend" aria-hidden="true">
          {t("seldom")} <span class="ramp" ref={ramp}><i /><i /><i /></span> {t("often")}
        </p>
      </div>
    </section>
  );
}
