// What is kept in the browser, and what an exported file holds.

/** Sampling and prompt of one chat. What is left out is the server's to decide. */
export interface Settings {
  model?: string;
  system?: string;
  temperature?: number;
  top_p?: number;
  top_k?: number;
  min_p?: number;
  repetition_penalty?: number;
  presence_penalty?: number;
  frequency_penalty?: number;
  max_tokens?: number;
  seed?: number;
  stop?: string[];
  /** Sent as the chat template's enable_thinking. */
  thinking?: boolean;
  /** JSON text of OpenAI's `tools`. */
  tools?: string;
  /** The oldest messages are left out of prompts that do not fit into the context. */
  dropsOldest?: boolean;
}

export interface Chat {
  id: string;
  title: string;
  created: number;
  updated: number;
  settings: Settings;
  /** Which child of a message is shown, by the id of the parent; "" is the parent of the first one. */
  selected: Record<string, string>;
}

export interface TextFile {
  name: string;
  text: string;
  /** What the text was read from, where that is not UTF-8: an encoding, or PDF. */
  encoding?: string;
  /** Of a PDF. */
  pages?: number;
}

/** How large a picture is: pixels a side as it is looked at, bytes of the file. */
export interface PictureFacts {
  type: string;
  width: number;
  height: number;
  size: number;
}

/** A picture of a message. Its bytes are in the store, under the id `picture`. */
export interface Picture extends PictureFacts {
  picture: string;
  name: string;
  /** What was given, where that is not what is sent. */
  from?: PictureFacts;
}

export type Attached = TextFile | Picture;

export const isPicture = (one: Attached): one is Picture => "picture" in one;

export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

/** Of an answer; times in seconds. */
export interface Usage {
  prompt: number;
  cached: number;
  completion: number;
  firstToken: number;
  decode: number;
  /** Of what was added to a beginning whose tokens nobody counted. */
  isRest?: boolean;
}

export type MessageState = "streaming" | "done" | "length" | "stopped" | "error";

export interface Message {
  id: string;
  chat: string;
  parent: string;
  role: "user" | "assistant" | "tool";
  content: string;
  created: number;
  files?: Attached[];
  reasoning?: string;
  reasoningSeconds?: number;
  calls?: ToolCall[];
  /** Of a tool's result: which call it answers. */
  callId?: string;
  model?: string;
  state?: MessageState;
  error?: string;
  /** The API's word for the kind of error. */
  errorCode?: string;
  /** The server would not take the message before this answer, and that is back in the field to write in. */
  isRefused?: boolean;
  /** Of an answer: how many of the oldest messages its prompt went without. */
  dropped?: number;
  usage?: Usage;
}
