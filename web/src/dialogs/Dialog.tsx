// The browser's own modal dialog: it keeps the focus inside, and Escape closes it.
import type { ComponentChildren } from "preact";
import { useEffect, useId, useRef } from "preact/hooks";
import { t } from "../i18n";
import { Icon } from "../icons";

interface Props {
  title: string;
  kind?: string;
  /** Missing: the dialog has to be answered. */
  onClose?: () => void;
  children: ComponentChildren;
}

export function Dialog({ title, kind = "", onClose, children }: Props) {
  const box = useRef<HTMLDialogElement>(null);
  const heading = useId();
  useEffect(() => {
    const before = document.activeElement;
    box.current!.showModal();
    return () => {
      const hasFocus = document.activeElement !== document.body; // what the dialog was closed for may have taken it
      if (!hasFocus && before instanceof HTMLElement) before.focus();
    };
  }, []);
  return (
    <dialog
      ref={box}
      class={kind}
      aria-labelledby={heading}
      onCancel={(event) => {
        event.preventDefault();
        onClose?.();
      }}
      onClick={(event) => event.target === box.current && onClose?.()}
    >
      <div class="dialog-body">
        <div class="dialog-head">
          <h2 id={heading}>{title}</h2>
          {onClose && (
            <button type="button" class="quiet" aria-label={t("close")} onClick={onClose}>
              <Icon name="close" />
            </button>
          )}
        </div>
        {children}
      </div>
    </dialog>
  );
}
