import { render } from "preact";
import "./style/theme.css";
import "./style/layout.css";
import "./style/files.css";
import "./style/message.css";
import "./style/status.css";
import { App } from "./App";
import { start } from "./state/state";

render(<App />, document.getElementById("app")!);
void start();
