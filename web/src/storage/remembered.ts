// Small texts that the browser, or this tab, remembers. Where it refuses they hold until the page closes.
interface Memory {
  get(name: string): string | undefined;
  set(name: string, text: string): void;
  forget(name: string): void;
  /** Of all that begin with this. */
  names(prefix: string): string[];
}

function over(storage: () => Storage): Memory {
  const held = new Map<string, string>();
  const attempt = <T>(work: (storage: Storage) => T): T | undefined => {
    try {
      return work(storage());
    } catch {
      return undefined; // blocked or full; the chats' store has the same trouble and says so
    }
  };
  return {
    get: (name) => held.get(name) ?? attempt((kept) => kept.getItem(name)) ?? undefined,
    set(name, text) {
      held.set(name, text);
      if (attempt((kept) => (kept.setItem(name, text), true))) held.delete(name);
    },
    forget(name) {
      held.delete(name);
      attempt((kept) => kept.removeItem(name));
    },
    names: (prefix) => (attempt((kept) => Object.keys(kept)) ?? []).filter((name) => name.startsWith(prefix)),
  };
}

export const inBrowser = over(() => localStorage);
export const inTab = over(() => sessionStorage);
