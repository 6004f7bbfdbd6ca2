/** Connects the timeline's canvases with the store: paints after changes, and turns events into changes. */
import { effect, type Signal } from "@preact/signals";
import { COST_NAMES, formatCost } from "../analysis/costs";
import { describeCounter, describeHolders, describeMark, describeSpan, markAt } from "../analysis/describe";
import { fractionAt, onDrag, onOverview, onPinch, onWheel } from "../input/gestures";
import { depthAt, levelTop, rowAt } from "../layout/rows";
import { durationOf, timeAt } from "../layout/viewport";
import { paintAxis } from "../paint/axis";
import { OverviewPainter } from "../paint/overview";
import { oncePerFrame, prepareSurface } from "../paint/surface";
import { TrackPainter } from "../paint/track-painter";
import type { Store } from "../store";
import { readCanvasColors, theme } from "../theme";
import { spanAt } from "../trace/depth-levels";
import { isMemory, peakOf } from "../trace/memory";
import { type Direction, neighbour } from "../trace/neighbours";
import type { Hover } from "./tooltip";

/** Maximum distance of a click from a thin span that it still hits, in CSS pixels. */
const HIT_TOLERANCE_PX = 3;

const DIRECTION_OF_KEY: Readonly<Record<string, Direction>> = {
  ArrowLeft: "left",
  ArrowRight: "right",
  ArrowUp: "up",
  ArrowDown: "down",
};

/** In CSS pixels of the page. */
interface Point {
  readonly clientX: number;
  readonly clientY: number;
}

export interface TimelineElements {
  readonly overview: HTMLCanvasElement;
  readonly axis: HTMLCanvasElement;
  /** The canvas of the tracks, and the focusable element around it that takes its events. */
  readonly tracks: HTMLCanvasElement;
  readonly area: HTMLElement;
  /** Scrolls the rows. */
  readonly scroller: HTMLElement;
}

export class TimelineController {
  private readonly trackPainter: TrackPainter;
  private readonly overviewPainter: OverviewPainter;
  private colors = readCanvasColors();
  private readonly schedulePaint = oncePerFrame(() => this.paint());
  private readonly disposers: (() => void)[];
  /** Position of the pointer over the tracks or the axis, in CSS pixels of the page; null if it is outside them. */
  private pointerAt: Point | null = null;

  /**
   * @param pointer receives the pointer's position in the viewport's width; keys zoom there
   * @param onPainted called after each painting
   */
  constructor(
    private readonly store: Store,
    private readonly elements: TimelineElements,
    private readonly hover: Signal<Hover | null>,
    private readonly pointer: { fraction: number },
    private readonly onPainted: () => void,
  ) {
    this.trackPainter = new TrackPainter(store);
    this.overviewPainter = new OverviewPainter(store);
    this.disposers = [
      this.observeSizes(),
      ...this.watchStore(),
      ...this.listenToGestures(),
      this.listenToPointerAndKeys(),
    ];
  }

  /** Stop painting and listening. */
  dispose(): void {
    for (const dispose of this.disposers) dispose();
  }

  private paint(): void {
    const { store, elements, colors } = this;
    const surface = prepareSurface(elements.tracks);
    if (!surface.width || !surface.height) return;
    // The span under the pointer may have changed since the last move.
    this.updateHover();
    this.trackPainter.paint(surface, elements.scroller.scrollTop, colors, this.hover.peek()?.span ?? -1);
    paintAxis(prepareSurface(elements.axis), store, colors);
    this.overviewPainter.paint(prepareSurface(elements.overview), colors);
    const { start, end } = store.viewport.value;
    elements.area.dataset.start = String(start);
    elements.area.dataset.end = String(end);
    this.onPainted();
  }

  private observeSizes(): () => void {
    const { tracks, axis, overview } = this.elements;
    const observer = new ResizeObserver(() => {
      this.store.rem.value = Number.parseFloat(getComputedStyle(document.documentElement).fontSize);
      this.schedulePaint();
    });
    for (const canvas of [tracks, axis, overview]) observer.observe(canvas);
    return () => observer.disconnect();
  }

  private watchStore(): (() => void)[] {
    const { store } = this;
    return [
      effect(() => {
        document.documentElement.dataset.theme = theme.value;
        this.colors = readCanvasColors();
        this.schedulePaint();
      }),
      effect(() => {
        const { viewport, selected, range, highlighted, rows, metrics, coloring } = store;
        const all = [viewport, selected, range, highlighted, rows, metrics, coloring, this.hover];
        for (const painted of all) void painted.value;
        this.schedulePaint();
      }),
      effect(() => {
        if (store.scrollRequests.value) this.scrollTo(store.selected.peek());
      }),
    ];
  }

  /** Scroll the rows as little as possible so that a span's level and the one below it are visible. */
  private scrollTo(span: number): void {
    const { store } = this;
    const { scroller } = this.elements;
    const { track, depth } = store.trace.spans;
    const row = store.rows.peek().find(({ type, index }) => type === "track" && index === track[span]);
    if (!row) return;
    const { level, header } = store.metrics.peek();
    const y = levelTop(row, depth[span], store.metrics.peek());
    const bottom = y + 2 * level;
    // The header of the process covers the top.
    if (y < scroller.scrollTop + header) scroller.scrollTop = y - header - level;
    else if (bottom > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = bottom - scroller.clientHeight;
  }

  private listenToGestures(): (() => void)[] {
    const { store } = this;
    const { area, axis, overview, scroller } = this.elements;
    return [
      onDrag(area, store, {
        mode: (event) => (event.shiftKey ? "range" : "pan"),
        scroll: (pixels) => scroller.scrollBy(0, pixels),
        click: (event) => store.select(this.spanUnder(event), { show: false }),
      }),
      onPinch(area, store),
      onDrag(axis, store, { mode: () => "range", click: () => store.setRange(null) }),
      onOverview(overview, store),
      onWheel(area, store, () => scroller.scrollHeight > scroller.clientHeight + 1),
      onWheel(axis, store, () => false),
    ];
  }

  private listenToPointerAndKeys(): () => void {
    const { store, pointer } = this;
    const { area, axis, tracks, scroller } = this.elements;
    const listening = new AbortController();
    const { signal } = listening;
    const move = (event: PointerEvent) => {
      pointer.fraction = fractionAt(tracks, event);
      this.pointerAt = event;
      this.updateHover();
    };
    const leave = () => {
      pointer.fraction = 0.5;
      this.pointerAt = null;
      this.updateHover();
    };
    const doubleClick = (event: MouseEvent) => {
      const span = this.spanUnder(event);
      if (span >= 0) store.show(store.rangeOf(span));
    };
    const keydown = (event: KeyboardEvent) => {
      if (event.key === "Enter" && store.highlighted.peek()) store.selectMatch(event.shiftKey ? -1 : 1);
      const direction = DIRECTION_OF_KEY[event.key];
      if (!direction || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      const next = neighbour(store.trace.spans, store.levels, store.selected.value, direction);
      if (next >= 0) store.select(next);
    };
    for (const element of [area, axis]) {
      element.addEventListener("pointermove", move, { signal });
      element.addEventListener("pointerleave", leave, { signal });
    }
    area.addEventListener("dblclick", doubleClick, { signal });
    area.addEventListener("keydown", keydown, { signal });
    scroller.addEventListener("scroll", this.schedulePaint, { signal, passive: true });
    return () => listening.abort();
  }

  private updateHover(): void {
    const { area } = this.elements;
    const position = "dragging" in area.dataset ? null : this.pointerAt;
    const next = position ? this.hoverAt(position) : null;
    area.style.cursor = next && next.span >= 0 ? "pointer" : "";
    const before = this.hover.peek();
    const same = next && before && next.title === before.title && next.x === before.x && next.y === before.y;
    if (!same || next.span !== before.span) this.hover.value = next;
  }

  /** The item under a point of the page: a span, the peak of memory, a mark, or a counter's value. */
  private hoverAt(point: Point): Hover | null {
    const { store } = this;
    const { trace } = store;
    const [x, y] = [point.clientX, point.clientY];
    const { row, time, toleranceNs } = this.placeOf(point);
    const span = this.spanUnder(point);
    if (span >= 0) {
      const cost = store.coloredCost.peek();
      const said = cost ? `, ${COST_NAMES[cost.cost]} ${formatCost(cost.cost, cost.ofSpan[span])}` : "";
      return { span, title: describeSpan(trace, span) + said, detail: trace.names[trace.spans.name[span]].fqn, x, y };
    }
    const counter = row?.type === "counter" ? trace.counters[row.index] : undefined;
    const peak = counter && isMemory(counter) ? counter.time[peakOf(counter)] : Number.NaN;
    if (counter && Math.abs(peak - time) <= toleranceNs) {
      const rows = trace.holders?.time === peak ? describeHolders(trace) : [];
      const detail = rows.length ? "Held by" : "";
      return { span, title: `peak of ${describeCounter(counter, peak)}`, detail, rows, x, y };
    }
    const mark = markAt(trace.marks, time, toleranceNs);
    if (mark) return { span, title: describeMark(mark), detail: "", x, y };
    const title = counter ? describeCounter(counter, time) : null;
    return title === null ? null : { span, title, detail: "", x, y };
  }

  /** The row, the height within all rows in CSS pixels, and the time at a point of the page. */
  private placeOf(point: Point) {
    const { store } = this;
    const { axis, area, tracks, scroller } = this.elements;
    const box = area.getBoundingClientRect();
    const inRows = point.clientY >= box.top;
    const y = point.clientY - box.top + scroller.scrollTop;
    const viewport = store.viewport.value;
    return {
      row: inRows ? rowAt(store.rows.value, y) : undefined,
      y,
      time: timeAt(viewport, fractionAt(inRows ? tracks : axis, point)),
      toleranceNs: (durationOf(viewport) / tracks.clientWidth) * HIT_TOLERANCE_PX,
    };
  }

  /** The span under a point of the page, or very near it; -1 for none. */
  private spanUnder(point: Point): number {
    const { store } = this;
    const { row, y, time, toleranceNs } = this.placeOf(point);
    const depth = row ? depthAt(row, y, store.metrics.value) : -1;
    if (!row || depth < 0) return -1;
    return spanAt(store.levels[row.index][depth], store.trace.spans, time, toleranceNs);
  }
}
