// Answers: asked for, streamed into a message, stopped. One chat may stream while another is looked at.
import { batch, computed, effect, signal, type Signal } from "@preact/signals";
import { ApiError, streamChat, type CallDelta, type Chunk } from "../api";
import { t } from "../i18n";
import { liveElsewhere, tellLive, tellOthers } from "./others";
import { bodyOf } from "./request";
import { changeChat, changeSettings, chat, chats, ensureChat, explain, messages, path, putMessage, settings } from "./state";
import { draftOf, setFiles, setText } from "../storage/drafts";
import { leave, newId } from "../storage/store";
import { pathTo } from "../storage/tree";
import { isPicture, type Attached, type Message, type ToolCall, type Usage } from "../storage/types";

export interface LiveAnswer {
  message: Signal<Message>;
  /** Tokens per second so far; 0: not known yet. */
  rate: Signal<number>;
  stop(): void;
  /** What is read so far, shown or not. */
  newest(): Message;
}

const SHOW_EVERY = 40; // ms, and more for long texts
const SAVE_EVERY = 500; // ms

/** By the id of the message. */
export const live = signal<ReadonlyMap<string, LiveAnswer>>(new Map());
export const liveHere = computed(() => [...live.value.values()].find((one) => one.message.value.chat === chat.value?.id));

/** Ends what is on its way in one chat, or everywhere. */
export function stopAnswers(id?: string): void {
  for (const one of live.value.values()) if (!id || one.message.value.chat === id) one.stop();
}

effect(() => tellLive([...live.value.keys()]));
effect(() => {
  const there = new Set(chats.value.map((one) => one.id)); // another tab may have deleted the chat
  for (const one of live.value.values()) if (!there.has(one.message.peek().chat)) one.stop();
});
let leavesAt = 0;
addEventListener("beforeunload", () => (leavesAt = performance.now()));
/** Firefox ends the streams of a page that is left before the page is told: nothing broke then. */
const isLeaving = () => leavesAt > 0 && performance.now() - leavesAt < 2000;
addEventListener("pagehide", () => leave([...live.value.values()].map((one) => one.newest())));

/** Whether an answer can go on as the same message: it was cut, and nothing follows it. */
export function canGoOn(message: Message): boolean {
  if (live.value.has(message.id) || liveElsewhere.value.has(message.id) || message.calls) return false;
  const isCut = message.role === "assistant" && message.state !== undefined && message.state !== "done";
  return isCut && hasBegun(message) && path.value.at(-1)?.id === message.id;
}

// What comes back.

function addCalls(calls: ToolCall[], deltas: CallDelta[]): ToolCall[] {
  const next = calls.map((call) => ({ ...call }));
  for (const delta of deltas) {
    const call = (next[delta.index] ??= { id: delta.id ?? newId(), name: "", arguments: "" });
    call.name += delta.function?.name ?? "";
    call.arguments += delta.function?.arguments ?? "";
  }
  return next.filter(Boolean);
}

/** One answer being read, into a message that may have its beginning: keeps the newest state, shows and saves it. */
class Reader {
  private firstAt = 0;
  private numDeltas = 0;
  private shownAt = 0;
  private saving = 0;
  private pending = 0;
  private readonly began = performance.now();
  private readonly usageBefore: Usage | undefined;
  private readonly thoughtBefore: number = 0;
  private readonly isRest: boolean;

  constructor(
    public now: Message,
    private readonly answer: LiveAnswer,
  ) {
    this.usageBefore = now.usage;
    this.isRest = Boolean(now.content || now.reasoning) && (!now.usage || Boolean(now.usage.isRest));
    if (now.content) return;
    this.thoughtBefore = now.reasoningSeconds ?? 0;
    delete now.reasoningSeconds;
  }

  take(chunk: Chunk): void {
    const choice = chunk.choices?.[0];
    const delta = choice?.delta;
    const reasoning = delta?.reasoning_content ?? delta?.reasoning;
    const next = { ...this.now, model: chunk.model ?? this.now.model };
    if (chunk.dropped) next.dropped = chunk.dropped;
    if (reasoning) next.reasoning = (next.reasoning ?? "") + reasoning;
    if (delta?.content) next.content += delta.content;
    if (delta?.tool_calls) next.calls = addCalls(next.calls ?? [], delta.tool_calls);
    if (reasoning || delta?.content || delta?.tool_calls) this.count();
    const isAnswer = next.content || next.calls;
    if (next.reasoning && !this.now.reasoningSeconds && isAnswer) next.reasoningSeconds = this.thought();
    if (choice?.finish_reason) next.state = choice.finish_reason === "length" ? "length" : "done";
    if (chunk.usage) next.usage = this.usage(chunk.usage);
    this.now = next;
    this.showSoon();
  }

  private seconds(since: number): number {
    return (performance.now() - since) / 1000;
  }

  private thought(): number {
    return this.thoughtBefore + (this.firstAt && this.seconds(this.firstAt));
  }

  private count(): void {
    this.firstAt ||= performance.now();
    this.numDeltas += 1;
  }

  private usage(usage: NonNullable<Chunk["usage"]>): Usage {
    const firstAt = this.firstAt || performance.now();
    const before = this.usageBefore;
    return {
      prompt: before?.prompt ?? usage.prompt_tokens,
      cached: before?.cached ?? usage.prompt_tokens_details?.cached_tokens ?? 0,
      completion: (before?.completion ?? 0) + usage.completion_tokens,
      firstToken: before?.firstToken ?? (firstAt - this.began) / 1000,
      decode: (before?.decode ?? 0) + (usage.decode_time ?? this.seconds(firstAt)),
      ...(this.isRest && { isRest: true }),
    };
  }

  private showSoon(): void {
    if (this.pending) return;
    const every = SHOW_EVERY + (this.now.content.length + (this.now.reasoning?.length ?? 0)) / 2000;
    const wait = Math.max(0, this.shownAt + every - performance.now());
    this.pending = window.setTimeout(() => this.show(), wait);
  }

  private show(): void {
    this.pending = 0;
    this.shownAt = performance.now();
    const elapsed = this.seconds(this.firstAt);
    batch(() => {
      this.answer.message.value = this.now;
      if (this.numDeltas > 2 && elapsed > 0.1) this.answer.rate.value = (this.numDeltas - 1) / elapsed;
    });
    this.saving ||= window.setTimeout(() => {
      this.saving = 0;
      void putMessage(this.now);
    }, SAVE_EVERY);
  }

  /** The last state of the message. */
  end(change: Partial<Message>): Message {
    clearTimeout(this.pending);
    clearTimeout(this.saving);
    this.now = { ...this.now, ...change };
    if (this.now.state === "streaming" && !change.state) this.now.state = "done";
    if (this.now.reasoning && !this.now.reasoningSeconds) this.now.reasoningSeconds = this.thought();
    return this.now;
  }
}

function saying(error: ApiError): string {
  const what = error.code === "unreachable" || error.code === "cut_off" ? t(error.code) : error.message;
  return error.retryAfter ? `${what} ${t("tryAgainIn", error.retryAfter)}` : what;
}

function answerOf(parent: Message, same?: Message): Message {
  if (same) {
    const { error: _error, errorCode: _code, isRefused: _refused, dropped: _dropped, ...rest } = same;
    return { ...rest, state: "streaming" };
  }
  return {
    id: newId(), chat: parent.chat, parent: parent.id, role: "assistant", content: "", created: Date.now(),
    state: "streaming",
  }; // prettier-ignore
}

const hasBegun = (message: Message) => Boolean(message.content || message.reasoning);

/** Whether the same request would be refused again, and not for its length, which has a way on of its own. */
function isRefusal({ status, code }: ApiError): boolean {
  return [400, 413, 422].includes(status) && code !== "context_length_exceeded";
}

/** Puts a message back into the field to write in, unless there is something else. */
function giveBack({ chat, content, files = [] }: Message): void {
  const draft = draftOf(chat);
  if (draft.text.peek() || draft.files.peek().length || draft.numReading.peek()) return;
  setText(draft, content);
  setFiles(draft, files);
}

/**
 * The answer to the last message of `context`, which begins with the first one of the chat. `same`: the message that
 * it goes into, and goes on with, where that has a beginning; else a new one.
 */
async function generate(context: Message[], same?: Message): Promise<void> {
  const parent = context.at(-1);
  const own = chats.value.find((one) => one.id === parent?.chat);
  if (!parent || !own) return;
  stopAnswers(own.id);
  const made = answerOf(parent, same);
  const controller = new AbortController();
  const answer: LiveAnswer = {
    message: signal(made), rate: signal(0), stop: () => controller.abort(), newest: () => reader.now,
  }; // prettier-ignore
  const reader = new Reader(made, answer);
  // All of this before anything else can happen: nobody waits for the store.
  live.value = new Map(live.value).set(made.id, answer);
  void putMessage(made);
  void changeChat(own.id, { selected: { [parent.id]: made.id }, updated: Date.now() });
  let last: Partial<Message> = {};
  try {
    const body = await bodyOf(context, own.settings, same && hasBegun(same) ? same : undefined);
    for await (const chunk of streamChat(body, controller.signal)) reader.take(chunk);
  } catch (error) {
    if (controller.signal.aborted) last = { state: "stopped" };
    else if (isLeaving()) last = { state: "streaming" };
    else if (error instanceof ApiError) {
      last = { state: "error", error: saying(error), ...(error.code && { errorCode: error.code }) };
      if (!same && isRefusal(error) && parent.files?.some(isPicture)) {
        last.isRefused = true;
        giveBack(parent);
      }
      if (error.status === 401 || error.status === 0 || error.code === "not_ready") void explain(error);
    } else last = { state: "error", error: error instanceof Error ? error.message : String(error) };
  }
  const ended = reader.end(last);
  const isKept = putMessage(ended);
  answer.message.value = ended;
  await isKept;
  const rest = new Map(live.value);
  rest.delete(made.id);
  live.value = rest;
  tellOthers();
}

// What a person can ask for.

function titleOf(content: string, files: Attached[]): string {
  const line = content.trim().split("\n")[0] || files.map((file) => file.name).join(", ");
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

/** A user's message after `parent` ("" is the beginning), and its answer. */
export async function send(content: string, files: Attached[], parent: string): Promise<void> {
  const before = pathTo(messages.value, parent);
  const own = ensureChat(titleOf(content, files));
  const made: Message = {
    id: newId(), chat: own.id, parent, role: "user", content, created: Date.now(), ...(files.length && { files }),
  }; // prettier-ignore
  void putMessage(made);
  void changeChat(own.id, { selected: { [parent]: made.id }, updated: Date.now() });
  await generate([...before, made]);
}

/** Another answer to the same message; the old one stays. */
export async function retry(message: Message): Promise<void> {
  const isAsked = [...live.value.values()].some((one) => one.message.peek().parent === message.parent);
  if (!isAsked) await generate(pathTo(messages.value, message.parent)); // twice the same click is one
}

/** The answer goes on where it was cut. */
export async function goOn(message: Message): Promise<void> {
  if (canGoOn(message)) await generate(pathTo(messages.value, message.parent), message);
}

/** Whether the request was refused for its length, and would not be without the oldest messages. */
export function canDropOldest(message: Message): boolean {
  const isRefused = message.state === "error" && message.errorCode === "context_length_exceeded" && !live.value.has(message.id);
  return isRefused && !settings.value.dropsOldest && path.value.at(-1)?.id === message.id && path.value.length > 2;
}

/** From here on the chat leaves out its oldest messages where it has to; the answer that was refused is asked for again. */
export async function goOnWithoutOldest(message: Message): Promise<void> {
  if (!canDropOldest(message)) return;
  changeSettings({ ...settings.value, dropsOldest: true });
  await generate(pathTo(messages.value, message.parent), message);
}

/** What the tools said, in the order of the calls, and the answer to that. */
export async function sendResults(message: Message, results: string[]): Promise<void> {
  const context = pathTo(messages.value, message.id);
  for (const [index, call] of (message.calls ?? []).entries()) {
    const made: Message = {
      id: newId(), chat: message.chat, parent: context.at(-1)!.id, role: "tool", content: results[index] ?? "", callId: call.id,
      created: Date.now(),
    }; // prettier-ignore
    void putMessage(made);
    context.push(made);
  }
  await generate(context);
}

/** Whether the tools in the settings can be sent; else why not. */
export function wrongTools(text: string): string {
  if (!text.trim()) return "";
  try {
    if (!Array.isArray(JSON.parse(text))) throw new Error("[...]");
    return "";
  } catch (error) {
    return t("toolsInvalid", error instanceof Error ? error.message : String(error));
  }
}

