/** The overview, the axis, and the tracks with their labels. */
import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { describeSpan } from "../analysis/describe";
import { plural } from "../format";
import { rowsHeight } from "../layout/rows";
import type { Store } from "../store";
import { StepBars } from "./step-bars";
import { TimelineController } from "./timeline-controller";
import { type Hover, Tooltip } from "./tooltip";
import { TrackLabels } from "./track-labels";

export const TIMELINE_ID = "timeline";

const LEVEL_CHOICES = [1, 2, 3, 4, 6, 8, 12, 20, 50, 100];

interface TimelineProps {
  readonly store: Store;
  readonly pointer: { fraction: number };
  readonly onPainted: () => void;
}

/** A button that folds all processes, if there are several. */
function FoldAll({ store }: { store: Store }) {
  const { processKeys, folded } = store;
  if (processKeys.length < 2) return <span aria-hidden="true">overview</span>;
  const allFolded = processKeys.every((key) => folded.value.has(key));
  return (
    <button type="button" class="link" onClick={store.foldAll}>
      {allFolded ? "unfold" : "fold"} all processes
    </button>
  );
}

/** The choice of the number of visible depth levels. */
function LevelChoice({ store }: { store: Store }) {
  const { value } = store.maxLevels;
  const choices = LEVEL_CHOICES.filter((count) => count < store.deepest);
  if (Number.isFinite(value) && !choices.includes(value)) choices.push(value);
  if (!choices.length) return null;
  return (
    <label>
      levels{" "}
      <select
        aria-label="Depth levels shown"
        value={Number.isFinite(value) ? value : "all"}
        onChange={(event) => {
          const chosen = event.currentTarget.value;
          store.maxLevels.value = chosen === "all" ? Infinity : Number(chosen);
        }}
      >
        <option value="all">all</option>
        {choices.map((count) => (
          <option key={count} value={count}>
            {count}
          </option>
        ))}
      </select>
    </label>
  );
}

export function Timeline({ store, pointer, onPainted }: TimelineProps) {
  const overview = useRef<HTMLCanvasElement>(null);
  const axis = useRef<HTMLCanvasElement>(null);
  const tracks = useRef<HTMLCanvasElement>(null);
  const area = useRef<HTMLDivElement>(null);
  const scroller = useRef<HTMLDivElement>(null);
  const hover = useSignal<Hover | null>(null);

  useEffect(() => {
    const elements = {
      overview: overview.current!,
      axis: axis.current!,
      tracks: tracks.current!,
      area: area.current!,
      scroller: scroller.current!,
    };
    const controller = new TimelineController(store, elements, hover, pointer, onPainted);
    return () => controller.dispose();
  }, [store]);

  const { count } = store.trace.spans;
  const selected = store.selected.value;
  return (
    <section class="timeline" aria-label="Timeline">
      <div class="ruler">
        <StepBars store={store} />
        <div class="corner">
          <FoldAll store={store} />
        </div>
        <canvas ref={overview} class="overview" aria-hidden="true" />
        <div class="corner">
          <LevelChoice store={store} />
        </div>
        <canvas ref={axis} class="axis" aria-hidden="true" />
      </div>
      <div ref={scroller} class="scroller" style={{ flexBasis: `${rowsHeight(store.rows.value)}px` }}>
        <div
          ref={area}
          id={TIMELINE_ID}
          class="tracks"
          role="application"
          tabIndex={0}
          aria-label={`Timeline of ${plural(store.spanCount, "span")}. Arrow keys go from span to span, question mark lists all keys.`}
        >
          <canvas ref={tracks} aria-hidden="true" />
          {!count && <p class="empty">This recording holds no spans.</p>}
        </div>
        <TrackLabels store={store} />
      </div>
      <Tooltip hover={hover} />
      <p class="visually-hidden" role="status">
        {selected >= 0 ? describeSpan(store.trace, selected) : ""}
      </p>
    </section>
  );
}
