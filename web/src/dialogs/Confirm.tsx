// A question before something is lost.
import { signal } from "@preact/signals";
import { Dialog } from "./Dialog";
import { t } from "../i18n";

interface Question {
  title: string;
  text: string;
  yes: string;
  answer: (isYes: boolean) => void;
}

const question = signal<Question | undefined>(undefined);

/** Resolves to whether the person says yes. */
export function ask(title: string, text: string, yes: string): Promise<boolean> {
  return new Promise((answer) => (question.value = { title, text, yes, answer }));
}

export function Confirm() {
  const asked = question.value;
  if (!asked) return null;
  const done = (isYes: boolean) => {
    question.value = undefined;
    asked.answer(isYes);
  };
  return (
    <Dialog title={asked.title} onClose={() => done(false)}>
      <p>{asked.text}</p>
      <div class="dialog-foot">
        <button onClick={() => done(false)}>{t("cancel")}</button>
        <button class="danger" onClick={() => done(true)}>{asked.yes}</button>
      </div>
    </Dialog>
  );
}
