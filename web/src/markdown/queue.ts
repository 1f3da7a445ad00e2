// Long chats are opened without a wait: the newest messages are set at once, the others as plain text, and one by one
// while nothing else is to do.

type Job = () => void;

const AT_ONCE = 30; // ms, before the first picture
const jobs: Job[] = []; // the newest last
let isFirst = true;
let isAsked = false;

function now(): void {
  isFirst = true;
  const end = performance.now() + AT_ONCE;
  while (jobs.length && performance.now() < end) jobs.pop()!();
  askAgain();
}

function next(): void {
  isAsked = false;
  jobs.pop()?.();
  askAgain();
}

function askAgain(): void {
  if (isAsked || !jobs.length) return;
  isAsked = true;
  setTimeout(next, 0); // lets keys and pictures go first
}

/** Runs the job before the next picture, or soon where there are many. Returns what cancels it. */
export function enqueue(job: Job): () => void {
  jobs.push(job);
  if (isFirst) queueMicrotask(now);
  isFirst = false;
  return () => {
    const at = jobs.lastIndexOf(job);
    if (at >= 0) jobs.splice(at, 1);
  };
}
