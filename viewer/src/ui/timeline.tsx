/** The overview, the axis and the tracks, with their labels and what the mouse and the keys do there. */
import { effect, useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";

import { onDrag, onOverview, onPinch, onWheel, timeAt } from "../input";
import { sliceAt } from "../lanes";
import { laneTop, type Row, rowAt } from "../layout";
import { type Direction, neighbour } from "../neighbours";
import { OverviewPainter, paintAxis } from "../paint/ruler";
import { highest, SlicePainter } from "../paint/slices";
import { prepare, scheduler } from "../paint/surface";
import type { Store } from "../store";
import { formatDuration, formatQuantity, plural } from "../text";
import { paints, theme } from "../theme";
import { PHASES } from "../trace";
import { length } from "../window";
import { Icon } from "./icons";

export const TIMELINE_ID = "timeline";

/** How far from a thin slice a click still hits it, in CSS pixels. */
const REACH = 3;

const ARROWS: Readonly<Record<string, Direction>> = {
  ArrowLeft: "left",
  ArrowRight: "right",
  ArrowUp: "up",
  ArrowDown: "down",
};

interface Hover {
  readonly span: number;
  readonly x: number;
  readonly y: number;
}

/** A slice in one line, for the tooltip and for those who listen. */
function inWords({ trace }: Store, span: number): string {
  const { spans, names } = trace;
  const state = spans.complete[span] ? "" : ", incomplete";
  const phase = trace.tracks[spans.track[span]].kind === "gpu" ? "GPU" : PHASES[spans.phase[span] as 0 | 1 | 2];
  return `${names[spans.name[span]].label}, ${phase}, ${formatDuration(spans.end[span] - spans.start[span])}${state}`;
}

function Label({ store, row }: { store: Store; row: Row }) {
  const counter = row.type === "counter" ? store.trace.counters[row.index] : undefined;
  return (
    <div
      class={`label ${row.type}`}
      data-row={row.key}
      data-kind={row.type === "track" ? store.trace.tracks[row.index].kind : row.type}
      style={{ top: `${row.top}px`, height: `${row.height}px` }}
    >
      <button type="button" aria-expanded={!row.folded} title={row.title} onClick={() => store.fold(row.key)}>
        <Icon name={row.folded ? "next" : "down"} />
        <span>{row.title}</span>
      </button>
      {counter && !row.folded && <small>up to {formatQuantity(highest(counter), counter.unit)}</small>}
    </div>
  );
}

function Labels({ store }: { store: Store }) {
  const rows = store.rows.value;
  const last = rows[rows.length - 1];
  return (
    <div class="labels" style={{ height: `${last ? last.top + last.height : 0}px` }}>
      {rows.map((row) => (
        <Label key={row.key} store={store} row={row} />
      ))}
    </div>
  );
}

export function Timeline({ store, pointer, painted }: { store: Store; pointer: { part: number }; painted: () => void }) {
  const overview = useRef<HTMLCanvasElement>(null);
  const axis = useRef<HTMLCanvasElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const box = useRef<HTMLDivElement>(null);
  const scroller = useRef<HTMLDivElement>(null);
  const hover = useSignal<Hover | null>(null);

  useEffect(() => {
    const [over, ruler, tracks, frame, scrolled] = [overview, axis, canvas, box, scroller].map((ref) => ref.current!) as [
      HTMLCanvasElement, HTMLCanvasElement, HTMLCanvasElement, HTMLDivElement, HTMLDivElement,
    ];
    const slicePainter = new SlicePainter(store);
    const overviewPainter = new OverviewPainter(store);
    let colors = paints();
    const paint = () => {
      const surface = prepare(tracks);
      if (!surface.width || !surface.height) return;
      slicePainter.paint(surface, scrolled.scrollTop, colors, hover.peek()?.span ?? -1);
      paintAxis(prepare(ruler), store, colors);
      overviewPainter.paint(prepare(over), colors);
      const { start, end } = store.window.value;
      frame.dataset.start = String(start);
      frame.dataset.end = String(end);
      painted();
    };
    const schedule = scheduler(paint);

    const at = (event: MouseEvent) => {
      const area = tracks.getBoundingClientRect();
      return { part: (event.clientX - area.left) / area.width, y: event.clientY - area.top + scrolled.scrollTop };
    };
    const spanAt = (event: MouseEvent): number => {
      const { part, y } = at(event);
      const row = rowAt(store.rows.value, y);
      if (row?.type !== "track") return -1;
      const { lane, gap } = store.metrics.value;
      const depth = Math.floor((y - row.top - Math.floor(gap / 2)) / lane);
      if (depth < 0 || depth >= row.depths) return -1;
      const window = store.window.value;
      const tolerance = (length(window) / tracks.clientWidth) * REACH;
      return sliceAt(store.lanes[row.index][depth], store.trace.spans, timeAt(window, part), tolerance);
    };

    const observer = new ResizeObserver(() => {
      store.rem.value = parseFloat(getComputedStyle(document.documentElement).fontSize);
      schedule();
    });
    for (const element of [tracks, ruler, over]) observer.observe(element);

    const undo = [
      () => observer.disconnect(),
      effect(() => {
        document.documentElement.dataset.theme = theme.value;
        colors = paints();
        schedule();
      }),
      effect(() => {
        const { window, selected, range, wanted, rows, metrics } = store;
        void [window.value, selected.value, range.value, wanted.value, rows.value, metrics.value, hover.value];
        schedule();
      }),
      // What was under the pointer has moved on.
      effect(() => {
        void store.window.value;
        hover.value = null;
      }),
      // Scroll the selection into sight where it was chosen elsewhere.
      effect(() => {
        if (!store.scroll.value) return;
        const span = store.selected.peek();
        const row = store.rows.peek().find((row) => row.type === "track" && row.index === store.trace.spans.track[span]);
        if (!row) return;
        const metrics = store.metrics.peek();
        const top = laneTop(row, store.trace.spans.depth[span], metrics);
        if (top < scrolled.scrollTop) scrolled.scrollTop = top - metrics.lane;
        const bottom = top + 2 * metrics.lane;
        if (bottom > scrolled.scrollTop + scrolled.clientHeight) scrolled.scrollTop = bottom - scrolled.clientHeight;
      }),
      onDrag(frame, store, {
        mode: (event) => (event.shiftKey ? "range" : "pan"),
        scroll: (pixels) => scrolled.scrollBy(0, pixels),
        click: (event) => store.select(spanAt(event), { show: false }),
      }),
      onPinch(frame, store),
      onDrag(ruler, store, {
        mode: () => "range",
        click: () => store.setRange(null),
      }),
      onOverview(over, store),
      onWheel(frame, store, () => scrolled.scrollHeight > scrolled.clientHeight + 1),
      onWheel(ruler, store, () => false),
    ];
    const move = (event: PointerEvent) => {
      pointer.part = at(event).part;
      const span = "dragging" in frame.dataset ? -1 : spanAt(event);
      frame.style.cursor = span >= 0 ? "pointer" : "";
      hover.value = span < 0 ? null : { span, x: event.clientX, y: event.clientY };
    };
    const leave = () => {
      pointer.part = 0.5;
      hover.value = null;
    };
    const twice = (event: MouseEvent) => {
      const span = spanAt(event);
      if (span >= 0) store.show(store.stretch(span));
    };
    const keys = (event: KeyboardEvent) => {
      const direction = ARROWS[event.key];
      if (!direction || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      const next = neighbour(store.trace.spans, store.lanes, store.selected.value, direction);
      if (next >= 0) store.select(next);
    };
    const listening = new AbortController();
    const { signal } = listening;
    frame.addEventListener("pointermove", move, { signal });
    frame.addEventListener("pointerleave", leave, { signal });
    frame.addEventListener("dblclick", twice, { signal });
    frame.addEventListener("keydown", keys, { signal });
    scrolled.addEventListener("scroll", schedule, { signal, passive: true });
    return () => {
      listening.abort();
      undo.forEach((stop) => stop());
    };
  }, [store]);

  const { count } = store.trace.spans;
  return (
    <section class="timeline" aria-label="Timeline">
      <div class="ruler">
        <div class="corner" aria-hidden="true">overview</div>
        <canvas ref={overview} class="overview" aria-hidden="true" />
        <div class="corner" />
        <canvas ref={axis} class="axis" aria-hidden="true" />
      </div>
      <div ref={scroller} class="scroller">
        <div
          ref={box}
          id={TIMELINE_ID}
          class="canvas"
          role="application"
          tabIndex={0}
          aria-label={`Timeline of ${plural(count, "slice")}. Arrow keys go from slice to slice, question mark lists all keys.`}
        >
          <canvas ref={canvas} aria-hidden="true" />
          {!count && <p class="empty">This recording holds no slices.</p>}
        </div>
        <Labels store={store} />
      </div>
      <Tooltip store={store} hover={hover} />
      <p class="spoken" role="status">{store.selected.value >= 0 ? inWords(store, store.selected.value) : ""}</p>
    </section>
  );
}

function Tooltip({ store, hover }: { store: Store; hover: { readonly value: Hover | null } }) {
  const at = hover.value;
  if (!at) return null;
  const left = at.x > innerWidth * 0.6;
  const place = left ? { right: `${innerWidth - at.x + 12}px` } : { left: `${at.x + 12}px` };
  const above = at.y > innerHeight * 0.75;
  const height = above ? { bottom: `${innerHeight - at.y + 12}px` } : { top: `${at.y + 16}px` };
  const name = store.trace.names[store.trace.spans.name[at.span]];
  return (
    <div class="tooltip" aria-hidden="true" style={{ ...place, ...height }}>
      <strong>{inWords(store, at.span)}</strong>
      {name.fqn && <span>{name.fqn}</span>}
    </div>
  );
}
