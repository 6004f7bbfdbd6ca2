/** Reads the timeline out of the page and shows it, or shows the error. */
import { render } from "preact";

import { createSession } from "./session";
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
  // The text is as large as the file, and is not needed any more.
  data?.remove();
  const session = createSession(decode(block));
  const { processes, comparison } = session.whole.trace;
  const title = comparison ? comparison.titles.join(" · ") : processes[0]?.name;
  if (title) document.title = `${title} – modtrace`;
  syncWithAddress(session);
  const onPainted = () => {
    document.documentElement.dataset.ready ??= String(Math.round(performance.now()));
  };
  render(<App session={session} onPainted={onPainted} />, root);
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
