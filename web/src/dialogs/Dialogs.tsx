// Preferences of this browser, and the question for the API key.
import { useSignal } from "@preact/signals";
import { useRef } from "preact/hooks";
import { stopAnswers } from "../state/answer";
import { apiKey } from "../api";
import { ask, Confirm } from "./Confirm";
import { Dialog } from "./Dialog";
import { language, t, type Key, type Language } from "../i18n";
import { Icon } from "../icons";
import { chats, connect, isKeyWanted, notice, removeAll, setLanguage, shownDialog, theme, type Theme } from "../state/state";
import { download, exportChats, importChats } from "../state/transfer";

const KEYS: [string, Key][] = [
  ["Enter", "keySend"],
  ["Shift + Enter", "keyLine"],
  ["Esc", "keyStop"],
  ["Ctrl + Shift + O", "keyNew"],
  ["Ctrl + K", "keySearch"],
  ["↑", "keyEdit"],
  ["Ctrl + Enter", "keyGoOn"],
];

async function importFile(file: File): Promise<void> {
  try {
    notice.value = t("imported", await importChats(await file.text()));
    shownDialog.value = "";
  } catch (error) {
    notice.value = t("importFailed", error instanceof Error ? error.message : String(error));
  }
}

function Chats() {
  const picker = useRef<HTMLInputElement>(null);
  const save = async () => {
    const day = new Date().toISOString().slice(0, 10);
    download(`ktransformers-chats-${day}.json`, await exportChats(chats.value));
  };
  const remove = async () => {
    if (await ask(t("deleteAll"), t("deleteAllText", chats.value.length), t("delete"))) {
      shownDialog.value = "";
      stopAnswers();
      await removeAll();
    }
  };
  return (
    <section>
      <h3>{t("data")}</h3>
      <div class="buttons">
        <button onClick={() => void save()} disabled={!chats.value.length}><Icon name="download" /> {t("exportAll")}</button>
        <button onClick={() => picker.current?.click()}><Icon name="upload" /> {t("importChats")}</button>
        <button class="danger" onClick={() => void remove()} disabled={!chats.value.length}>
          <Icon name="trash" /> {t("deleteAll")}
        </button>
        <input
          ref={picker}
          type="file"
          accept=".json,application/json"
          hidden
          aria-label={t("importChats")}
          onChange={(event) => {
            const file = event.currentTarget.files?.[0];
            if (file) void importFile(file);
            event.currentTarget.value = "";
          }}
        />
      </div>
    </section>
  );
}

export function Preferences() {
  return (
    <Dialog title={t("preferences")} kind="sheet" onClose={() => (shownDialog.value = "")}>
      <div class="grid">
        <label class="field">
          <span>{t("language")}</span>
          <select value={language.value} onChange={(event) => setLanguage(event.currentTarget.value as Language)}>
            <option value="en" lang="en">English</option>
            <option value="zh" lang="zh-CN">简体中文</option>
          </select>
        </label>
        <label class="field">
          <span>{t("theme")}</span>
          <select value={theme.value} onChange={(event) => (theme.value = event.currentTarget.value as Theme)}>
            {(["auto", "light", "dark"] as const).map((name) => <option key={name} value={name}>{t(name)}</option>)}
          </select>
        </label>
      </div>
      <Chats />
      {apiKey.get() && (
        <section>
          <h3>{t("apiKey")}</h3>
          <button
            onClick={() => {
              apiKey.forget();
              shownDialog.value = "";
              void connect();
            }}
          >
            {t("forgetKey")}
          </button>
        </section>
      )}
      <section>
        <h3>{t("api")}</h3>
        <p class="hint">
          {t("apiText", new URL("v1", document.baseURI).href)} <a href="docs" target="_blank" rel="noopener">{t("apiDocs")}</a>
        </p>
      </section>
      <section>
        <h3>{t("keyboard")}</h3>
        <dl class="keys">
          {KEYS.map(([key, what]) => (
            <div key={key}>
              <dt><kbd>{key}</kbd></dt>
              <dd>{t(what)}</dd>
            </div>
          ))}
        </dl>
      </section>
    </Dialog>
  );
}

function KeyForm() {
  const isRemembered = useSignal(false);
  const field = useRef<HTMLInputElement>(null);
  const isWrong = isKeyWanted.value === "wrong";
  const submit = (event: Event) => {
    event.preventDefault();
    const key = field.current!.value.trim();
    if (!key) return;
    apiKey.set(key, isRemembered.value);
    void connect(true);
  };
  return (
    <Dialog title={t("keyNeeded")}>
      <form onSubmit={submit}>
        <p>{t("keyText")}</p>
        <label class="field wide">
          <span>{t("apiKey")}</span>
          <input ref={field} type="password" autocomplete="off" autofocus aria-invalid={isWrong} />
        </label>
        {isWrong && <p class="error" role="alert">{t("keyWrong")}</p>}
        <label class="check">
          <input type="checkbox" onChange={(event) => (isRemembered.value = event.currentTarget.checked)} />
          {t("remember")}
        </label>
        <div class="dialog-foot">
          <button class="primary">{t("connect")}</button>
        </div>
      </form>
    </Dialog>
  );
}

export function KeyDialog() {
  return (
    <>
      <Confirm />
      {isKeyWanted.value && <KeyForm />}
    </>
  );
}
