// The HTTP API of this server: models, readiness, figures, and answers as streams.
import { EventSourceParserStream } from "eventsource-parser/stream";
import { inBrowser, inTab } from "./storage/remembered";

const KEY = "ktransformers.key";

/** An answer of the server that is no success, or none at all (status 0). retryAfter: seconds. */
export class ApiError extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly code: string = "",
    readonly retryAfter: number = 0,
  ) {
    super(message);
  }
}

export const apiKey = {
  get: (): string => inTab.get(KEY) ?? inBrowser.get(KEY) ?? "",
  set(key: string, isRemembered: boolean): void {
    apiKey.forget();
    (isRemembered ? inBrowser : inTab).set(KEY, key);
  },
  forget(): void {
    inTab.forget(KEY);
    inBrowser.forget(KEY);
  },
};

async function errorOf(response: Response): Promise<ApiError> {
  let message = `${response.status} ${response.statusText}`;
  let code = "";
  try {
    const { error } = (await response.json()) as { error: { message?: string; code?: string | null } };
    message = error.message ?? message;
    code = error.code ?? "";
  } catch {
    // no JSON: a proxy's page, say; the status is what there is to tell
  }
  return new ApiError(message, response.status, code, Number(response.headers.get("retry-after")) || 0);
}

async function ask(path: string, init: RequestInit = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  const key = apiKey.get();
  if (key) headers.set("Authorization", `Bearer ${key}`);
  let response: Response;
  try {
    response = await fetch(path, { ...init, headers, cache: "no-store" });
  } catch (error) {
    if (init.signal?.aborted) throw error;
    throw new ApiError("", 0, "unreachable");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** The same for what answers in JSON: the connection may break, or a proxy's page come, after a good status. */
async function askJson(path: string, init: RequestInit = {}): Promise<unknown> {
  const response = await ask(path, init);
  try {
    return await response.json();
  } catch (error) {
    if (init.signal?.aborted) throw error;
    throw new ApiError("", 0, "unreachable");
  }
}

export interface Model {
  id: string;
  max_model_len?: number;
  architecture?: { input_modalities?: string[] };
}

export async function getModels(): Promise<Model[]> {
  return ((await askJson("v1/models")) as { data: Model[] }).data;
}

/** What requests get that name no sampling: numbers under the names that requests have. Parts may be missing. */
export async function getDefaults(model: string): Promise<Record<string, unknown>> {
  const info = await askJson(`server_info?model=${encodeURIComponent(model)}`);
  const { default_sampling: sampling, default_max_tokens: maxTokens } = info as Record<string, unknown>;
  return { ...(sampling as object | undefined), max_tokens: maxTokens };
}

/** Resolves when requests are served; else an ApiError says what keeps them waiting. */
export async function getReady(): Promise<void> {
  await ask("ready");
}

export async function getStatus(signal: AbortSignal): Promise<unknown> {
  return askJson("v1/status", { signal });
}

export interface CallDelta {
  index: number;
  id?: string;
  function?: { name?: string; arguments?: string };
}

export interface Chunk {
  /** How many of the oldest messages were left out, of the request: said once, before anything else. */
  dropped?: number;
  model?: string;
  choices?: {
    delta?: { content?: string | null; reasoning_content?: string | null; reasoning?: string | null; tool_calls?: CallDelta[] };
    finish_reason?: string | null;
  }[];
  usage?: {
    prompt_tokens: number;
    completion_tokens: number;
    prompt_tokens_details?: { cached_tokens?: number };
    decode_time?: number;
  } | null;
  error?: { message?: string; code?: string | null };
}

/** The chunks of one answer. Aborting the signal ends it on the server, too. */
export async function* streamChat(body: object, signal: AbortSignal): AsyncGenerator<Chunk> {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const dropped = Number(response.headers.get("x-ktransformers-dropped-messages"));
  if (dropped > 0) yield { dropped };
  const events = response.body!.pipeThrough(new TextDecoderStream()).pipeThrough(new EventSourceParserStream());
  const reader = events.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new ApiError("", 0, "cut_off");
      if (value.data === "[DONE]") return;
      const chunk = JSON.parse(value.data) as Chunk;
      if (chunk.error) throw new ApiError(chunk.error.message ?? "", 200, chunk.error.code ?? "");
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ApiError || signal.aborted) throw error;
    throw new ApiError("", 0, "cut_off");
  } finally {
    reader.cancel().catch(() => undefined);
  }
}
