/** The bar on top: the name of the recording or comparison, search, steps, and the switches. */
import { useRef } from "preact/hooks";
import { describeBars } from "../analysis/bar-counts";
import { countIncomplete } from "../analysis/loss-report";
import { formatCount, formatDuration, plural } from "../format";
import { durationOf, timeAt } from "../layout/viewport";
import type { Session } from "../session";
import type { Store } from "../store";
import { theme, toggleTheme } from "../theme";
import { stepAt } from "../trace/steps";
import { Icon } from "./icons";
import { TIMELINE_ID } from "./timeline";

export const SEARCH_ID = "search";

const SYNTAX = "Words of a name or path; /regular expression/; class:Linear; phase:backward or phase:gpu; >1ms, <20us";

/** The number of matches, by kind of bar, and which of them is selected. */
function describeMatches({ query, search, highlighted, matches, matchCounts, selected }: Store): string {
  const count = matches.value.length;
  if (search.value.error) return search.value.error;
  if (!highlighted.value) return query.value ? "nothing to search for" : "";
  if (!count) return "no match";
  const position = matches.value.indexOf(selected.value);
  const kinds = matchCounts.value.spans < count ? describeBars(matchCounts.value) : "";
  if (position < 0) return kinds || `${formatCount(count)} found`;
  return `${formatCount(position + 1)} of ${formatCount(count)}${kinds && `: ${kinds}`}`;
}

function Search({ store }: { store: Store }) {
  const input = useRef<HTMLInputElement>(null);
  const { query, matches } = store;
  const count = matches.value.length;
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key === "Enter" && count) {
      store.selectMatch(event.shiftKey ? -1 : 1);
      // On the timeline Enter goes to the next match, and all other keys work.
      document.getElementById(TIMELINE_ID)?.focus();
    }
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
        placeholder="Search: name, /regex/, class:Linear, phase:backward, >1ms"
        aria-label="Search names and fully qualified names"
        title={SYNTAX}
        value={query.value}
        onInput={(event) => {
          store.query.value = event.currentTarget.value;
        }}
        onKeyDown={onKeyDown}
      />
      <output class="match-count" aria-live="polite">
        {describeMatches(store)}
      </output>
      <button
        type="button"
        class="icon-button"
        title="Previous match (Shift+N)"
        aria-label="Previous match"
        disabled={!count}
        onClick={() => store.selectMatch(-1)}
      >
        <Icon name="previous" />
      </button>
      <button
        type="button"
        class="icon-button"
        title="Next match (N)"
        aria-label="Next match"
        disabled={!count}
        onClick={() => store.selectMatch(1)}
      >
        <Icon name="next" />
      </button>
    </form>
  );
}

function Steps({ store }: { store: Store }) {
  const { steps, step, previousStep, nextStep } = store;
  if (!steps.length) return null;
  const index = step.value;
  return (
    <div class="steps" role="group" aria-label="Training steps">
      <button
        type="button"
        class="icon-button"
        title="Previous step ( [ )"
        aria-label="Previous step"
        disabled={previousStep.value < 0}
        onClick={() => store.toStep(previousStep.value)}
      >
        <Icon name="previous" />
      </button>
      <button
        type="button"
        class="icon-button wide"
        title="Zoom to the step in the middle"
        onClick={() => store.toStep(stepAt(steps, timeAt(store.viewport.value, 0.5)))}
      >
        {index < 0 ? plural(steps.length, "step") : `${steps[index].name} · ${index + 1} of ${steps.length}`}
      </button>
      <button
        type="button"
        class="icon-button"
        title="Next step ( ] )"
        aria-label="Next step"
        disabled={nextStep.value < 0}
        onClick={() => store.toStep(nextStep.value)}
      >
        <Icon name="next" />
      </button>
    </div>
  );
}

/** The compared sides, and a button back to the recording. */
function Compared({ store, session }: { store: Store; session: Session }) {
  const [before, after] = store.trace.comparison!.titles;
  return (
    <div class="compared">
      <span>
        {before} · {after}
      </span>
      {session.compared.value && (
        <button type="button" class="more" onClick={() => session.compare(null)}>
          Back to the recording
        </button>
      )}
    </div>
  );
}

function LossBadge({ store }: { store: Store }) {
  const { stats } = store.trace;
  const lost = (stats.overwritten ?? 0) + (stats.torn ?? 0);
  const { all: incomplete } = countIncomplete(store.trace);
  if (!lost && !incomplete) return null;
  const losses = [
    lost ? `${plural(lost, "event")} lost` : "",
    incomplete ? `${formatCount(incomplete)} incomplete` : "",
  ];
  return (
    <button
      type="button"
      class="loss-badge"
      title="What is missing from this recording"
      onClick={() => {
        store.tab.value = "recording";
      }}
    >
      <Icon name="warning" />
      {losses.filter(Boolean).join(" · ")}
    </button>
  );
}

interface ToolbarProps {
  readonly store: Store;
  readonly session: Session;
  readonly openHelp: () => void;
}

export function Toolbar({ store, session, openHelp }: ToolbarProps) {
  const dark = theme.value === "dark";
  return (
    <header class="toolbar">
      <h1>
        <svg class="logo" viewBox="0 0 20 16" aria-hidden="true">
          <path class="forward" d="M0 0h20v4H0z" />
          <path class="backward" d="M2 6h10v4H2z" />
          <path class="mark" d="M14 6h4v4h-4zM4 12h6v4H4z" />
        </svg>
        modtrace
      </h1>
      <p class="summary">
        {plural(store.spanCount, "span")} · {formatDuration(durationOf(store.bounds))}
      </p>
      <Search store={store} />
      {store.trace.comparison ? <Compared store={store} session={session} /> : <Steps store={store} />}
      <LossBadge store={store} />
      <div class="switches">
        <button
          type="button"
          class="icon-button"
          title="Show all (0)"
          aria-label="Show the whole recording"
          onClick={store.showAll}
        >
          <Icon name="fit" />
        </button>
        <button
          type="button"
          class="icon-button"
          title="Light or dark"
          aria-label={dark ? "Switch to light" : "Switch to dark"}
          onClick={toggleTheme}
        >
          <Icon name={dark ? "sun" : "moon"} />
        </button>
        <button
          type="button"
          class="icon-button"
          title="Keys and legend (?)"
          aria-label="Keys and legend"
          onClick={openHelp}
        >
          <Icon name="help" />
        </button>
      </div>
    </header>
  );
}
