/** The lower part: the selected span, totals, the flame graph, and the recording itself. */
import { useSignal } from "@preact/signals";
import type { FunctionComponent } from "preact";

import type { Store, Tab } from "../../store";
import { FlamePanel } from "./flame-panel";
import { ModulesPanel } from "./modules-panel";
import { RecordingPanel } from "./recording-panel";
import { SelectionPanel } from "./selection-panel";

const TABS: readonly { id: Tab; title: string; body: FunctionComponent<{ store: Store }> }[] = [
  { id: "selection", title: "Selection", body: SelectionPanel },
  { id: "modules", title: "Modules", body: ModulesPanel },
  { id: "flame", title: "Flame graph", body: FlamePanel },
  { id: "recording", title: "Recording", body: RecordingPanel },
];

/** Heights of the panel in percent of the page. */
const INITIAL_HEIGHT = 36;
const MIN_HEIGHT = 12;
const MAX_HEIGHT = 80;
const KEY_STEP = 4;

/** Drags the panel's upper edge. */
function Splitter({ height }: { height: { value: number } }) {
  const resize = (percent: number) => {
    height.value = Math.round(Math.min(Math.max(percent, MIN_HEIGHT), MAX_HEIGHT));
  };
  const drag = (event: PointerEvent) => {
    const handle = event.currentTarget as HTMLElement;
    if (event.type === "pointerdown") handle.setPointerCapture(event.pointerId);
    else if (handle.hasPointerCapture(event.pointerId)) resize((1 - event.clientY / innerHeight) * 100);
  };
  const onKeyDown = (event: KeyboardEvent) => {
    const change = { ArrowUp: KEY_STEP, ArrowDown: -KEY_STEP }[event.key];
    if (!change) return;
    event.preventDefault();
    resize(height.value + change);
  };
  return (
    <div
      class="splitter"
      role="separator"
      tabIndex={0}
      aria-label="Height of the details"
      aria-orientation="horizontal"
      aria-valuemin={MIN_HEIGHT}
      aria-valuemax={MAX_HEIGHT}
      aria-valuenow={height.value}
      onPointerDown={drag}
      onPointerMove={drag}
      onKeyDown={onKeyDown}
    />
  );
}

function TabList({ store }: { store: Store }) {
  const current = store.tab.value;
  const onKeyDown = (event: KeyboardEvent) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const index = TABS.findIndex((tab) => tab.id === current);
    const next = TABS[(index + step + TABS.length) % TABS.length];
    store.tab.value = next.id;
    document.getElementById(`tab-${next.id}`)?.focus();
  };
  return (
    <div class="tabs" role="tablist" aria-label="Details" onKeyDown={onKeyDown}>
      {TABS.map(({ id, title }) => (
        <button
          key={id}
          id={`tab-${id}`}
          type="button"
          role="tab"
          aria-selected={id === current}
          aria-controls="details"
          tabIndex={id === current ? 0 : -1}
          onClick={() => {
            store.tab.value = id;
          }}
        >
          {title}
        </button>
      ))}
    </div>
  );
}

export function DetailsPanel({ store }: { store: Store }) {
  const height = useSignal(INITIAL_HEIGHT);
  const current = store.tab.value;
  const Panel = TABS.find((tab) => tab.id === current)!.body;
  return (
    <section class="panel" aria-label="Details" style={{ height: `${height.value}%` }}>
      <Splitter height={height} />
      <TabList store={store} />
      <div id="details" class={`body ${current}`} role="tabpanel" tabIndex={0} aria-labelledby={`tab-${current}`}>
        <Panel store={store} />
      </div>
    </section>
  );
}
