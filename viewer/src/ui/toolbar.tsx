/** The bar on top: what is shown, search, steps, and the switches. */
import { useRef } from "preact/hooks";

import { incompleteIn } from "../losses";
import type { Store } from "../store";
import { formatCount, formatDuration, plural } from "../text";
import { theme, toggleTheme } from "../theme";
import { length } from "../window";
import { Icon } from "./icons";

export const SEARCH_ID = "search";

function Search({ store }: { store: Store }) {
  const input = useRef<HTMLInputElement>(null);
  const { query, found, selected } = store;
  const count = found.value.length;
  const at = found.value.indexOf(selected.value);
  const report = !query.value ? "" : !count ? "no match" : at < 0 ? `${formatCount(count)} found` : `${formatCount(at + 1)} of ${formatCount(count)}`;
  const keys = (event: KeyboardEvent) => {
    if (event.key === "Enter") store.find(event.shiftKey ? -1 : 1);
    if (event.key !== "Escape") return;
    store.query.value = "";
    input.current?.blur();
  };
  return (
    <form class="search" role="search" onSubmit={(event) => event.preventDefault()}>
      <Icon name="search" />
      <input
        ref={input}
        id={SEARCH_ID}
        type="search"
        autocomplete="off"
        spellcheck={false}
        placeholder="Search names and paths"
        aria-label="Search names and fully qualified names"
        value={query.value}
        onInput={(event) => {
          store.query.value = event.currentTarget.value;
        }}
        onKeyDown={keys}
      />
      <output class="finds" aria-live="polite">{report}</output>
      <button type="button" class="quiet" title="Previous find (Shift+N)" aria-label="Previous find" disabled={!count} onClick={() => store.find(-1)}>
        <Icon name="previous" />
      </button>
      <button type="button" class="quiet" title="Next find (N)" aria-label="Next find" disabled={!count} onClick={() => store.find(1)}>
        <Icon name="next" />
      </button>
    </form>
  );
}

function Steps({ store }: { store: Store }) {
  const { steps, step } = store;
  if (!steps.length) return null;
  const at = step.value;
  const shown = steps[at];
  // With more than this in sight it is not one step that is shown.
  const several = shown && length(store.window.value) > 1.6 * length(shown);
  return (
    <div class="steps" role="group" aria-label="Training steps">
      <button type="button" class="quiet" title="Previous step ( [ )" aria-label="Previous step" disabled={at <= 0} onClick={() => store.toStep(at - 1)}>
        <Icon name="previous" />
      </button>
      <button type="button" class="quiet wide" title="Zoom to the step in the middle" onClick={() => store.toStep(at)}>
        {!shown || several ? plural(steps.length, "step") : `${shown.name} · ${at + 1} of ${steps.length}`}
      </button>
      <button type="button" class="quiet" title="Next step ( ] )" aria-label="Next step" disabled={at >= steps.length - 1} onClick={() => store.toStep(at + 1)}>
        <Icon name="next" />
      </button>
    </div>
  );
}

function Losses({ store }: { store: Store }) {
  const { stats } = store.trace;
  const lost = (stats.overwritten ?? 0) + (stats.torn ?? 0);
  const incomplete = incompleteIn(store.trace);
  if (!lost && !incomplete) return null;
  const parts = [lost ? `${plural(lost, "event")} lost` : "", incomplete ? `${formatCount(incomplete)} incomplete` : ""];
  return (
    <button
      type="button"
      class="losses"
      title="What is missing from this recording"
      onClick={() => {
        store.tab.value = "recording";
      }}
    >
      <Icon name="warning" />
      {parts.filter(Boolean).join(" · ")}
    </button>
  );
}

export function Toolbar({ store, help }: { store: Store; help: () => void }) {
  const dark = theme.value === "dark";
  return (
    <header class="toolbar">
      <h1>
        <svg class="logo" viewBox="0 0 20 16" aria-hidden="true">
          <path class="one" d="M0 0h20v4H0z" />
          <path class="two" d="M2 6h10v4H2z" />
          <path class="three" d="M14 6h4v4h-4zM4 12h6v4H4z" />
        </svg>
        modtrace
      </h1>
      <p class="summary">
        {plural(store.trace.spans.count, "slice")} · {formatDuration(length(store.bounds))}
      </p>
      <Search store={store} />
      <Steps store={store} />
      <Losses store={store} />
      <div class="switches">
        <button type="button" class="quiet" title="Show all (0)" aria-label="Show the whole recording" onClick={store.showAll}>
          <Icon name="fit" />
        </button>
        <button type="button" class="quiet" title="Light or dark" aria-label={dark ? "Switch to light" : "Switch to dark"} onClick={toggleTheme}>
          <Icon name={dark ? "sun" : "moon"} />
        </button>
        <button type="button" class="quiet" title="Keys and legend (?)" aria-label="Keys and legend" onClick={help}>
          <Icon name="help" />
        </button>
      </div>
    </header>
  );
}
