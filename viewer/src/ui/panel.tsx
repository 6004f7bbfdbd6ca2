/** The lower part: the selected slice, totals, the flame graph, and the recording itself. */
import { useSignal } from "@preact/signals";
import type { FunctionComponent } from "preact";

import type { Store, Tab } from "../store";
import { Flame } from "./flame";
import { Modules } from "./modules";
import { Recording } from "./recording";
import { Selection } from "./selection";

const TABS: readonly { id: Tab; title: string; body: FunctionComponent<{ store: Store }> }[] = [
  { id: "selection", title: "Selection", body: Selection },
  { id: "modules", title: "Modules", body: Modules },
  { id: "flame", title: "Flame graph", body: Flame },
  { id: "recording", title: "Recording", body: Recording },
];

/** Heights of the panel in percent of the page. */
const LEAST = 12;
const MOST = 80;

export function Panel({ store }: { store: Store }) {
  const height = useSignal(36);
  const chosen = store.tab.value;
  const Body = TABS.find((tab) => tab.id === chosen)!.body;

  const resize = (percent: number) => {
    height.value = Math.round(Math.min(Math.max(percent, LEAST), MOST));
  };
  const drag = (event: PointerEvent) => {
    const handle = event.currentTarget as HTMLElement;
    if (event.type === "pointerdown") handle.setPointerCapture(event.pointerId);
    else if (handle.hasPointerCapture(event.pointerId)) resize((1 - event.clientY / innerHeight) * 100);
  };
  const resizeKeys = (event: KeyboardEvent) => {
    const by = { ArrowUp: 4, ArrowDown: -4 }[event.key];
    if (!by) return;
    event.preventDefault();
    resize(height.value + by);
  };
  const tabKeys = (event: KeyboardEvent) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const at = TABS.findIndex((tab) => tab.id === chosen);
    const next = TABS[(at + by + TABS.length) % TABS.length];
    store.tab.value = next.id;
    document.getElementById(`tab-${next.id}`)?.focus();
  };

  return (
    <section class="panel" aria-label="Details" style={{ height: `${height.value}%` }}>
      <div
        class="splitter"
        role="separator"
        tabIndex={0}
        aria-label="Height of the details"
        aria-orientation="horizontal"
        aria-valuemin={LEAST}
        aria-valuemax={MOST}
        aria-valuenow={height.value}
        onPointerDown={drag}
        onPointerMove={drag}
        onKeyDown={resizeKeys}
      />
      <div class="tabs" role="tablist" aria-label="Details" onKeyDown={tabKeys}>
        {TABS.map(({ id, title }) => (
          <button
            key={id}
            id={`tab-${id}`}
            type="button"
            role="tab"
            aria-selected={id === chosen}
            aria-controls="details"
            tabIndex={id === chosen ? 0 : -1}
            onClick={() => {
              store.tab.value = id;
            }}
          >
            {title}
          </button>
        ))}
      </div>
      <div id="details" class={`body ${chosen}`} role="tabpanel" tabIndex={0} aria-labelledby={`tab-${chosen}`}>
        <Body store={store} />
      </div>
    </section>
  );
}
