import { render } from "preact";

import { decode, unpack } from "./payload";
import { createStore } from "./store";
import "./style.css";
import { theme } from "./theme";
import { App } from "./ui/app";

const app = document.getElementById("app")!;
document.documentElement.dataset.theme = theme.value;

async function open(): Promise<void> {
  const data = document.getElementById("modtrace-data");
  const block = await unpack(data?.textContent ?? "");
  // The text is as large as the file, and not needed again.
  data?.remove();
  const store = createStore(decode(block));
  const [process] = store.trace.processes;
  if (process) document.title = `${process.name} – modtrace`;
  const ready = () => {
    document.documentElement.dataset.ready ??= String(Math.round(performance.now()));
  };
  render(<App store={store} painted={ready} />, app);
}

open().catch((error: unknown) => {
  const message = error instanceof Error ? error.message : String(error);
  render(
    <div class="failed" role="alert">
      <h1>This timeline cannot be shown</h1>
      <p>{message}</p>
    </div>,
    app,
  );
});
