// What Enter means in a field to write in.

/**
 * Whether the key belongs to an input method that is composing, which takes Enter for "this word" and Escape for "none
 * of these". Safari ends the composition before it sends the key, and marks that by 229.
 */
export function isComposing(event: KeyboardEvent): boolean {
  return event.isComposing || event.keyCode === 229;
}

/** Fingers have no Shift key: there Enter is a new line, and the button sends. */
function isTouched(): boolean {
  return matchMedia("(hover: none) and (pointer: coarse)").matches;
}

/** Whether this key sends: Enter alone where there is a keyboard, with Ctrl or Cmd everywhere. */
export function sends(event: KeyboardEvent): boolean {
  if (event.key !== "Enter" || isComposing(event) || event.shiftKey || event.altKey) return false;
  return event.ctrlKey || event.metaKey || !isTouched();
}

/** What the Enter key of an on-screen keyboard shows. */
export function enterHint(): "enter" | "send" {
  return isTouched() ? "enter" : "send";
}
