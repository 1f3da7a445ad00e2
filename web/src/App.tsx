// The frame: sidebar, view, dialogs, and keys that work everywhere.
import { useEffect } from "preact/hooks";
import { stopAnswers } from "./state/answer";
import { isComposing } from "./keys";
import { ChatView } from "./chat/ChatView";
import { KeyDialog, Preferences } from "./dialogs/Dialogs";
import { t } from "./i18n";
import { SettingsDialog } from "./dialogs/SettingsDialog";
import { Sidebar } from "./Sidebar";
import { chat, isSidebarOpen, notice, open, openSidebar, shownDialog, view } from "./state/state";
import { StatusView } from "./status/StatusView";


function onKey(event: KeyboardEvent): void {
  if (isComposing(event)) return; // Escape ends the composition then, and no answer
  const isCommand = event.ctrlKey || event.metaKey;
  const key = event.key.toLowerCase();
  if (isCommand && key === "k") {
    event.preventDefault();
    openSidebar();
    document.getElementById("search")?.focus();
  } else if (isCommand && event.shiftKey && key === "o") {
    event.preventDefault();
    open({ name: "new" });
    document.getElementById("composer")?.focus();
  } else if (key === "escape" && !document.querySelector("dialog[open]")) {
    if (isSidebarOpen.value) isSidebarOpen.value = false;
    else if (chat.value) stopAnswers(chat.value.id);
  }
}

function Notice() {
  const text = notice.value;
  useEffect(() => {
    if (!text) return;
    const timer = setTimeout(() => (notice.value = ""), 4000 + 2000 * text.split("\n").length);
    return () => clearTimeout(timer);
  }, [text]);
  return (
    <div class="notices" role="status">
      {text && <div class="notice">{text}</div>}
    </div>
  );
}

export function App() {
  useEffect(() => {
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);
  return (
    <>
      <Sidebar />
      {isSidebarOpen.value && (
        <button class="backdrop" aria-label={t("close")} onClick={() => (isSidebarOpen.value = false)} />
      )}
      <main inert={isSidebarOpen.value}>{view.value.name === "status" ? <StatusView /> : <ChatView />}</main>
      <Notice />
      {shownDialog.value === "settings" && <SettingsDialog />}
      {shownDialog.value === "preferences" && <Preferences />}
      <KeyDialog />
    </>
  );
}
