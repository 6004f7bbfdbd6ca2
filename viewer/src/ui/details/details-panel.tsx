/** The part below or beside the tracks: the selected span, totals, the flame graph, and the recording itself. */
import { useSignal } from "@preact/signals";
import type { FunctionComponent } from "preact";

import type { Dock } from "../../layout/dock";
import type { Session } from "../../session";
import type { Store, Tab } from "../../store";
import { Icon } from "../icons";
import { ChangesPanel } from "./changes-panel";
import { FindingsPanel } from "./findings-panel";
import { FlamePanel } from "./flame-panel";
import { ModulesPanel } from "./modules-panel";
import { RecordingPanel } from "./recording-panel";
import { SelectionPanel } from "./selection-panel";
import { StepsPanel } from "./steps-panel";

interface PanelProps {
  readonly store: Store;
  readonly session: Session;
}

interface TabBody {
  readonly title: string;
  readonly body: FunctionComponent<PanelProps>;
}

const TABS: Readonly<Record<Tab, TabBody>> = {
  findings: { title: "Findings", body: FindingsPanel },
  changes: { title: "Changes", body: ChangesPanel },
  selection: { title: "Selection", body: SelectionPanel },
  modules: { title: "Modules", body: ModulesPanel },
  steps: { title: "Steps", body: StepsPanel },
  flame: { title: "Flame graph", body: FlamePanel },
  recording: { title: "Recording", body: RecordingPanel },
};

/** Sizes of the panel in percent of the page. */
const INITIAL_SIZE = { below: 36, beside: 42, besideCompared: 48 } as const;
const MIN_SIZE = 12;
const MAX_SIZE = 80;
const KEY_STEP = 4;

/** The panel's edge towards the tracks, which can be dragged. */
function Splitter({ size, dock }: { size: { value: number }; dock: Dock }) {
  const resize = (percent: number) => {
    size.value = Math.round(Math.min(Math.max(percent, MIN_SIZE), MAX_SIZE));
  };
  const drag = (event: PointerEvent) => {
    const handle = event.currentTarget as HTMLElement;
    const fraction = dock === "below" ? event.clientY / innerHeight : event.clientX / innerWidth;
    if (event.type === "pointerdown") handle.setPointerCapture(event.pointerId);
    else if (handle.hasPointerCapture(event.pointerId)) resize((1 - fraction) * 100);
  };
  const onKeyDown = (event: KeyboardEvent) => {
    const grow = dock === "below" ? "ArrowUp" : "ArrowLeft";
    const shrink = dock === "below" ? "ArrowDown" : "ArrowRight";
    const change = { [grow]: KEY_STEP, [shrink]: -KEY_STEP }[event.key];
    if (!change) return;
    event.preventDefault();
    resize(size.value + change);
  };
  return (
    <div
      class="splitter"
      role="separator"
      tabIndex={0}
      aria-label={dock === "below" ? "Height of the details" : "Width of the details"}
      aria-orientation={dock === "below" ? "horizontal" : "vertical"}
      aria-valuemin={MIN_SIZE}
      aria-valuemax={MAX_SIZE}
      aria-valuenow={size.value}
      onPointerDown={drag}
      onPointerMove={drag}
      onKeyDown={onKeyDown}
    />
  );
}

interface DetailsPanelProps extends PanelProps {
  readonly dock: Dock;
  readonly setDock: ((dock: Dock) => void) | undefined;
}

function TabList({ store, dock, setDock }: DetailsPanelProps) {
  const { tabs } = store;
  const current = store.tab.value;
  const onKeyDown = (event: KeyboardEvent) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = tabs[(tabs.indexOf(current) + step + tabs.length) % tabs.length];
    store.tab.value = next;
    document.getElementById(`tab-${next}`)?.focus();
  };
  return (
    <div class="tab-bar">
      <div class="tabs" role="tablist" aria-label="Details" onKeyDown={onKeyDown}>
        {tabs.map((id) => (
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
            {TABS[id].title}
          </button>
        ))}
      </div>
      {setDock && (
        <button
          type="button"
          class="icon-button dock"
          title={dock === "below" ? "Put this beside the tracks" : "Put this below the tracks"}
          aria-label={dock === "below" ? "Put the details beside the tracks" : "Put the details below the tracks"}
          onClick={() => setDock(dock === "below" ? "beside" : "below")}
        >
          <Icon name={dock === "below" ? "beside" : "below"} />
        </button>
      )}
    </div>
  );
}

/**
 * @param dock the position of the panel
 * @param setDock moves the panel; undefined if the page is too narrow for a choice
 */
export function DetailsPanel({ store, session, dock, setDock }: DetailsPanelProps) {
  const sizes = {
    below: useSignal<number>(INITIAL_SIZE.below),
    beside: useSignal<number>(store.trace.comparison ? INITIAL_SIZE.besideCompared : INITIAL_SIZE.beside),
  };
  const size = sizes[dock];
  const current = store.tab.value;
  const { body: Panel } = TABS[current];
  return (
    <section class="panel" aria-label="Details" style={{ [dock === "below" ? "height" : "width"]: `${size.value}%` }}>
      <Splitter size={size} dock={dock} />
      <TabList store={store} dock={dock} session={session} setDock={setDock} />
      <div id="details" class="body" role="tabpanel" tabIndex={0} aria-labelledby={`tab-${current}`}>
        <Panel store={store} session={session} />
      </div>
    </section>
  );
}
