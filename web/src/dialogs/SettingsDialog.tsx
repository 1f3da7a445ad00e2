// Sampling, prompt and tools of one chat. Changes hold from the next answer on.
import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { wrongTools } from "../state/answer";
import { getDefaults } from "../api";
import { Dialog } from "./Dialog";
import { n, t, type Key } from "../i18n";
import { changeSettings, keepDefaults, model, models, notice, settings, shownDialog } from "../state/state";
import type { Settings } from "../storage/types";

type NumberName =
  | "temperature" | "top_p" | "top_k" | "min_p" | "repetition_penalty" | "presence_penalty" | "frequency_penalty"
  | "max_tokens" | "seed"; // prettier-ignore

const NUMBERS: { name: NumberName; min: number; max?: number; step: number }[] = [
  { name: "temperature", min: 0, max: 2, step: 0.05 },
  { name: "top_p", min: 0.01, max: 1, step: 0.01 },
  { name: "top_k", min: 0, step: 1 },
  { name: "min_p", min: 0, max: 1, step: 0.01 },
  { name: "repetition_penalty", min: 0.01, max: 2, step: 0.01 },
  { name: "presence_penalty", min: -2, max: 2, step: 0.1 },
  { name: "frequency_penalty", min: -2, max: 2, step: 0.1 },
  { name: "max_tokens", min: 1, step: 1 },
  { name: "seed", min: 0, step: 1 },
];

/** What the field stands for while it is empty; "" where the server does not say. */
function placeholderOf(name: NumberName, defaults: Record<string, unknown>): string {
  const value = defaults[name];
  if (typeof value === "number") return String(Number(value.toPrecision(6)));
  if (name === "seed") return t("randomSeed");
  const size = model.value?.max_model_len;
  return name === "max_tokens" && size ? t("upTo", n(size)) : "";
}

/** The server's defaults for the model of this chat. */
function useDefaults(): Record<string, unknown> {
  const defaults = useSignal<Record<string, unknown>>({});
  const id = model.value?.id;
  useEffect(() => {
    defaults.value = {};
    if (!id) return;
    let isCurrent = true;
    const take = (found: Record<string, unknown>) => {
      if (isCurrent) defaults.value = found;
    };
    getDefaults(id).then(take, () => undefined); // not offered, or the model is not loaded: the fields stay blank
    return () => {
      isCurrent = false;
    };
  }, [id]);
  return defaults.value;
}

function NumberField({ name, min, max, step, placeholder }: (typeof NUMBERS)[number] & { placeholder: string }) {
  return (
    <label class="field">
      <span>{t(name as Key)}</span>
      <input
        type="number"
        min={min}
        max={max}
        step={step < 1 ? "any" : step}
        placeholder={placeholder}
        inputMode={step < 1 ? "decimal" : "numeric"}
        defaultValue={settings.peek()[name]?.toString() ?? ""}
        onInput={(event) => {
          const { value, valueAsNumber, validity } = event.currentTarget;
          if (validity.valid) change(name, value === "" ? undefined : valueAsNumber);
        }}
        onChange={(event) => event.currentTarget.reportValidity()}
      />
    </label>
  );
}

function change<Name extends keyof Settings>(name: Name, value: Settings[Name] | undefined): void {
  const next = { ...settings.value };
  if (value === undefined) delete next[name];
  else next[name] = value;
  changeSettings(next);
}

export function SettingsDialog() {
  const toolsError = useSignal("");
  const serverDefaults = useDefaults();
  const now = settings.value;
  const thinking = now.thinking === undefined ? "" : now.thinking ? "on" : "off";
  return (
    <Dialog title={t("settings")} kind="sheet" onClose={() => (shownDialog.value = "")}>
      <p class="hint">{t("settingsHint")}</p>
      {models.value.length > 1 && (
        <label class="field wide">
          <span>{t("model")}</span>
          <select value={now.model ?? models.value[0]!.id} onChange={(event) => change("model", event.currentTarget.value)}>
            {models.value.map(({ id }) => <option key={id}>{id}</option>)}
          </select>
        </label>
      )}
      <label class="field wide">
        <span>{t("system")}</span>
        <textarea
          rows={4}
          defaultValue={now.system ?? ""}
          onInput={(event) => change("system", event.currentTarget.value || undefined)}
        />
      </label>
      <div class="grid">
        {NUMBERS.map((number) => (
          <NumberField key={number.name} {...number} placeholder={placeholderOf(number.name, serverDefaults)} />
        ))}
        <label class="field">
          <span>{t("thinkingMode")}</span>
          <select
            value={thinking}
            onChange={(event) => {
              const chosen = event.currentTarget.value;
              change("thinking", chosen ? chosen === "on" : undefined);
            }}
          >
            <option value="">{t("byModel")}</option>
            <option value="on">{t("on")}</option>
            <option value="off">{t("off")}</option>
          </select>
        </label>
      </div>
      <label class="field wide">
        <span>{t("fullContext")}</span>
        <select
          value={now.dropsOldest ? "drop" : ""}
          onChange={(event) => change("dropsOldest", event.currentTarget.value ? true : undefined)}
        >
          <option value="">{t("byServer")}</option>
          <option value="drop">{t("dropOldest")}</option>
        </select>
      </label>
      <label class="field wide">
        <span>{t("stopStrings")}</span>
        <textarea
          rows={2}
          defaultValue={now.stop?.join("\n") ?? ""}
          onInput={(event) => {
            const stops = event.currentTarget.value.split("\n").filter(Boolean);
            change("stop", stops.length ? stops : undefined);
          }}
        />
      </label>
      <label class="field wide">
        <span>{t("tools")}</span>
        <textarea
          rows={4}
          class="code-field"
          spellcheck={false}
          defaultValue={now.tools ?? ""}
          aria-invalid={toolsError.value !== ""}
          onInput={(event) => {
            const text = event.currentTarget.value;
            toolsError.value = wrongTools(text);
            if (!toolsError.value) change("tools", text.trim() || undefined);
          }}
        />
        {toolsError.value && <span class="error" role="alert">{toolsError.value}</span>}
      </label>
      <div class="dialog-foot">
        <button
          onClick={() => {
            keepDefaults(now);
            notice.value = t("saved");
            shownDialog.value = "";
          }}
        >
          {t("asDefault")}
        </button>
        <button class="primary" onClick={() => (shownDialog.value = "")}>{t("close")}</button>
      </div>
    </Dialog>
  );
}
