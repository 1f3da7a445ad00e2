// What GET /v1/status says, read with care: parts that a backend does not know are null or missing.

export interface RequestLine {
  id: string;
  at: number;
  status: string;
  prompt: number | undefined;
  completion: number | undefined;
  firstToken: number | undefined;
  seconds: number | undefined;
  reason: string;
}

export interface Figures {
  model: string;
  backend: string;
  queue: { running: number; waiting: number; suspended: number | undefined } | undefined;
  kv: { used: number; total: number } | undefined;
  prefix: { hits: number; queries: number } | undefined;
  speed: { prefill: number; decode: number } | undefined;
  memory: { rate: number; limit: number } | undefined;
  /** counts[row] of layer layers[row]. */
  experts: { layers: number[]; counts: number[][] } | undefined;
  requests: RequestLine[];
}

type Fields = Record<string, unknown>;

const isFields = (value: unknown): value is Fields => typeof value === "object" && value !== null && !Array.isArray(value);
const text = (value: unknown): string => (typeof value === "string" || typeof value === "number" ? String(value) : "");
const number = (value: unknown): number | undefined =>
  typeof value === "number" && Number.isFinite(value) ? value : undefined;
const items = (value: unknown): unknown[] => (Array.isArray(value) ? value : []);

/** The two numbers of a part under names of ours; undefined if neither is there. */
function pair<A extends string, B extends string>(part: unknown, [a, from]: [A, string], [b, other]: [B, string]) {
  if (!isFields(part)) return undefined;
  const [first, second] = [number(part[from]), number(part[other])];
  if (first === undefined && second === undefined) return undefined;
  return { [a]: first ?? 0, [b]: second ?? 0 } as Record<A | B, number>;
}

function queueOf(part: unknown): Figures["queue"] {
  const queue = pair(part, ["running", "running"], ["waiting", "waiting"]);
  return queue && { ...queue, suspended: isFields(part) ? number(part.suspended) : undefined };
}

function expertsOf(part: unknown): Figures["experts"] {
  const rows = items(isFields(part) ? part.layers : undefined)
    .filter(isFields)
    .map((row, index) => ({ layer: number(row.layer) ?? index, counts: items(row.counts).map((count) => number(count) ?? 0) }))
    .filter((row) => row.counts.length);
  return rows.length ? { layers: rows.map((row) => row.layer), counts: rows.map((row) => row.counts) } : undefined;
}

/** Milliseconds since 1970: `at` may be seconds since then, or a date as text. */
function timeOf(value: unknown): number {
  return typeof value === "string" ? Date.parse(value) || 0 : (number(value) ?? 0) * 1000;
}

function lineOf(row: Fields): RequestLine {
  return {
    id: text(row.id),
    at: timeOf(row.at),
    status: text(row.status),
    prompt: number(row.prompt_tokens),
    completion: number(row.completion_tokens),
    firstToken: number(row.ttft),
    seconds: number(row.seconds),
    reason: text(row.finish_reason),
  };
}

export function figuresOf(json: unknown): Figures {
  const all = isFields(json) ? json : {};
  return {
    model: text(all.model),
    backend: text(all.backend),
    queue: queueOf(all.queue),
    kv: pair(all.kv, ["used", "used_tokens"], ["total", "total_tokens"]),
    prefix: pair(all.prefix, ["hits", "hits"], ["queries", "queries"]),
    speed: pair(all.speed, ["prefill", "prefill_tps"], ["decode", "decode_tps"]),
    memory: pair(all.memory, ["rate", "gbps"], ["limit", "limit_gbps"]),
    experts: expertsOf(all.experts),
    requests: items(all.requests)
      .filter(isFields)
      .map(lineOf)
      .sort((a, b) => b.at - a.at),
  };
}
