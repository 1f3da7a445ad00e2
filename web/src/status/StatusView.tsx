// What the server is doing: figures once a second, experts, and the last requests.
import { useSignal, type Signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import type { ComponentChildren } from "preact";
import { ApiError, getStatus } from "../api";
import { MenuButton } from "../chat/ChatView";
import { figuresOf, type Figures } from "./figures";
import { HeatMap } from "./HeatMap";
import { n, t } from "../i18n";
import { explain, obstacle } from "../state/state";

const EVERY = 1000; // ms
const MAX_SAMPLES = 120;
const MIN_SHOWN = 30;

function Card({ title, children }: { title: string; children: ComponentChildren }) {
  return (
    <section class="card">
      <h2>{title}</h2>
      {children}
    </section>
  );
}

function Big({ value, unit }: { value: string; unit: string }) {
  return (
    <p class="big">
      <strong>{value}</strong> <span>{unit}</span>
    </p>
  );
}

function Meter({ share, label }: { share: number; label: string }) {
  const percent = Math.max(0, Math.min(100, Math.round(share * 100)));
  return (
    <div class="meter" role="meter" aria-label={label} aria-valuemin={0} aria-valuemax={100} aria-valuenow={percent}>
      <div style={{ width: `${percent}%` }} />
    </div>
  );
}

function Sparkline({ values }: { values: number[] }) {
  const top = Math.max(...values, 1e-9);
  const points = values.map((value, index) => {
    const x = (index / Math.max(values.length - 1, MIN_SHOWN)) * 240;
    return `${x.toFixed(1)},${(38 - (value / top) * 34).toFixed(1)}`;
  });
  return (
    <svg class="sparkline" viewBox="0 0 240 40" preserveAspectRatio="none" aria-hidden="true">
      <polygon points={`0,40 ${points.join(" ")} ${points.at(-1)?.split(",")[0] ?? 0},40`} />
      <polyline points={points.join(" ")} />
    </svg>
  );
}

function Cards({ now, history }: { now: Figures; history: Figures[] }) {
  const { queue, kv, prefix, speed, memory } = now;
  return (
    <div class="cards">
      {speed && (
        <>
          <Card title={t("decode")}>
            <Big value={n(speed.decode, 1)} unit="tokens/s" />
            <Sparkline values={history.map((one) => one.speed?.decode ?? 0)} />
          </Card>
          <Card title={t("prefill")}>
            <Big value={n(speed.prefill, 1)} unit="tokens/s" />
            <Sparkline values={history.map((one) => one.speed?.prefill ?? 0)} />
          </Card>
        </>
      )}
      {memory && (
        <Card title={t("memory")}>
          <Big value={n(memory.rate, 1)} unit={memory.limit ? t("ofLimit", n(memory.limit, 1)) : "GB/s"} />
          {memory.limit > 0 && <Meter share={memory.rate / memory.limit} label={t("memory")} />}
        </Card>
      )}
      {queue && (
        <Card title={t("queue")}>
          <Big value={n(queue.running)} unit={t("running")} />
          <Big value={n(queue.waiting)} unit={t("waiting")} />
          {queue.suspended !== undefined && <Big value={n(queue.suspended)} unit={t("suspended")} />}
        </Card>
      )}
      {kv && kv.total > 0 && (
        <Card title={t("kvCache")}>
          <Big value={`${n((kv.used / kv.total) * 100)} %`} unit="" />
          <p class="hint">{t("ofTokens", n(kv.used), n(kv.total))}</p>
          <Meter share={kv.used / kv.total} label={t("kvCache")} />
        </Card>
      )}
      {prefix && (
        <Card title={t("prefixHits")}>
          <Big
            value={prefix.queries ? `${n((prefix.hits / prefix.queries) * 100)} %` : "–"}
            unit=""
          />
          <p class="hint">{t("ofTokens", n(prefix.hits), n(prefix.queries))}</p>
          {prefix.queries > 0 && <Meter share={prefix.hits / prefix.queries} label={t("prefixHits")} />}
        </Card>
      )}
    </div>
  );
}

const orDash = (value: number | undefined, digits = 0): string => (value === undefined ? "–" : n(value, digits));

function Requests({ lines }: { lines: Figures["requests"] }) {
  return (
    <section class="card">
      <h2>{t("requests")}</h2>
      {!lines.length && <p class="hint">{t("noRequests")}</p>}
      {lines.length > 0 && (
        <div class="table-box" tabIndex={0} role="group" aria-label={t("requests")}>
          <table class="log">
            <thead>
              <tr>
                <th>{t("time")}</th>
                <th>{t("request")}</th>
                <th>{t("statusColumn")}</th>
                <th class="number">{t("prompt")}</th>
                <th class="number">{t("answer")}</th>
                <th class="number">{t("firstToken")}</th>
                <th class="number">{t("duration")}</th>
                <th>{t("end")}</th>
              </tr>
            </thead>
            <tbody>
              {lines.slice(0, 200).map((line) => (
                <tr key={line.id}>
                  <td>{line.at ? new Date(line.at).toLocaleTimeString([], { hour12: false }) : "–"}</td>
                  <td><code title={line.id}>{line.id.length > 18 ? `${line.id.slice(0, 17)}…` : line.id}</code></td>
                  <td>{line.status}</td>
                  <td class="number">{orDash(line.prompt)}</td>
                  <td class="number">{orDash(line.completion)}</td>
                  <td class="number">{line.firstToken === undefined ? "–" : `${n(line.firstToken, 2)} s`}</td>
                  <td class="number">{line.seconds === undefined ? "–" : `${n(line.seconds, 2)} s`}</td>
                  <td>{line.reason || "–"}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}

function useFigures(): { history: Signal<Figures[]>; isMissing: Signal<boolean> } {
  const history = useSignal<Figures[]>([]);
  const isMissing = useSignal(false);
  useEffect(() => {
    const controller = new AbortController();
    let timer = 0;
    const step = async () => {
      try {
        if (!document.hidden) {
          const now = figuresOf(await getStatus(controller.signal));
          history.value = [...history.value.slice(1 - MAX_SAMPLES), now];
          obstacle.value = "";
        }
      } catch (error) {
        if (controller.signal.aborted) return;
        if (error instanceof ApiError && error.status === 404) {
          isMissing.value = true;
          return;
        }
        await explain(error);
      }
      timer = window.setTimeout(() => void step(), EVERY);
    };
    void step();
    return () => {
      controller.abort();
      clearTimeout(timer);
    };
  }, []);
  return { history, isMissing };
}

export function StatusView() {
  const { history, isMissing } = useFigures();
  const now = history.value.at(-1);
  return (
    <>
      <header class="bar">
        <MenuButton />
        <h1 class="chat-title">{t("status")}</h1>
        {now && <span class="model-name">{[now.model, now.backend].filter(Boolean).join(" · ")}</span>}
      </header>
      <div class="scroller" tabIndex={0} role="region" aria-label={t("status")}>
        <div class="status">
          {obstacle.value && <p class="obstacle" role="status">{obstacle.value}</p>}
          {isMissing.value && <p class="hint">{t("noStatus")}</p>}
          {now && (
            <>
              <Cards now={now} history={history.value} />
              {now.experts && <HeatMap experts={now.experts} />}
              <Requests lines={now.requests} />
            </>
          )}
        </div>
      </div>
    </>
  );
}
