/** Reads the timeline out of the page and shows it; where that fails, says why. */
import { render } from "preact";

import { createStore } from "./store";
import "./style/index.css";
import { theme } from "./theme";
import { decode, unpack } from "./trace/payload";
import { App } from "./ui/app";
import { syncWithAddress } from "./url-state";

const root = document.getElementById("app")!;
document.documentElement.dataset.theme = theme.value;

async function openTimeline(): Promise<void> {
  const data = document.getElementById("modtrace-data");
  const block = await unpack(data?.textContent ?? "");
  // The text is as large as the file, and not needed again.
  data?.remove();
  const store = createStore(decode(block));
  const [process] = store.trace.processes;
  if (process) document.title = `${process.name} – modtrace`;
  syncWithAddress(store);
  const onPainted = () => {
    document.documentElement.dataset.ready ??= String(Math.round(performance.now()));
  };
  render(<App store={store} onPainted={onPainted} />, root);
}

openTimeline().catch((error: unknown) => {
  const message = error instanceof Error ? error.message : String(error);
  render(
    <div class="failed" role="alert">
      <h1>This timeline cannot be shown</h1>
      <p>{message}</p>
    </div>,
    root,
  );
});
