/** Paints the rows: slices in batches of one colour, their labels, and what marks them. */
import { type Row, laneTop } from "../layout";
import { lowerBound, visible } from "../lanes";
import { markStride } from "../marks";
import type { Store } from "../store";
import type { Paints } from "../theme";
import { ticks } from "../ticks";
import { type CounterSeries, RECOMPUTE } from "../trace";
import { Fitter, type Surface } from "./surface";

/** Narrower than this a slice has no label. */
const LABEL_FROM = 22;
/** Narrower than this neighbours have no gap between them. */
const GAP_FROM = 3;
export const TICK_PIXELS = 110;
/** Marks are at least this far apart, so that their names have room. */
export const MARK_PIXELS = 90;

interface Palette {
  /** The colour of each name, as an index into the next two. */
  readonly ofName: Int32Array;
  readonly fills: readonly string[];
  readonly inks: readonly string[];
}

function paletteOf(store: Store): Palette {
  const used = [...store.colors.keys()];
  const index = new Map(used.map((name, i) => [name, i]));
  return {
    ofName: Int32Array.from(store.trace.names, (name) => index.get(name.moduleClass || name.label)!),
    fills: used.map((name) => store.colors.get(name)!.fill),
    inks: used.map((name) => store.colors.get(name)!.ink),
  };
}

/** What the painter keeps from frame to frame. */
export class SlicePainter {
  private readonly palette: Palette;
  private readonly batches: number[][];
  private readonly dimmed: number[][];
  private fitter: Fitter | undefined;
  private font = "";
  private hatch: CanvasPattern | null = null;
  private dots: CanvasPattern | null = null;

  constructor(private readonly store: Store) {
    this.palette = paletteOf(store);
    this.batches = this.palette.fills.map(() => []);
    this.dimmed = this.palette.fills.map(() => []);
  }

  paint(surface: Surface, scrollTop: number, paints: Paints, hovered: number): void {
    const { context, width, height, scale } = surface;
    const { store } = this;
    const { start, end } = store.window.value;
    const nsPerPixel = (end - start) / width;
    const x = (time: number) => Math.round(((time - start) / nsPerPixel) * scale) / scale;
    this.begin(context, paints);

    for (const tick of ticks(store.window.value, width, TICK_PIXELS)) {
      context.fillStyle = paints.faint;
      context.fillRect(x(tick.time), 0, 1, height);
    }
    const labels: number[] = [];
    const incomplete: number[] = [];
    const recomputed: number[] = [];
    const shown = store.rows.value.filter((row) => row.top + row.height > scrollTop && row.top < scrollTop + height);
    for (const row of shown) {
      context.fillStyle = paints.line;
      context.fillRect(0, row.top + row.height - scrollTop - 1, width, 1);
      if (row.type === "counter") this.counter(surface, row, scrollTop, x, paints);
      if (row.type === "track") {
        this.lanes(surface, row, scrollTop, nsPerPixel, x, labels, incomplete, recomputed);
      }
    }
    this.flush(context);
    const lane = store.metrics.value.lane - 1;
    const pattern = (fill: CanvasPattern | null, boxes: number[]) => {
      context.fillStyle = fill!;
      for (let i = 0; i < boxes.length; i += 3) context.fillRect(boxes[i], boxes[i + 1], boxes[i + 2], lane);
    };
    pattern(this.dots, recomputed);
    pattern(this.hatch, incomplete);
    this.labels(context, labels, lane, paints);
    this.marks(surface, x, paints);
    this.range(surface, x, paints);
    this.selection(surface, scrollTop, x, paints, hovered);
  }

  private begin(context: CanvasRenderingContext2D, paints: Paints): void {
    const font = `${Math.round(this.store.metrics.value.lane * 0.7)}px ${paints.slices}`;
    context.font = font;
    context.textBaseline = "middle";
    if (font !== this.font || !this.fitter) {
      this.font = font;
      this.fitter = new Fitter(context);
    }
    this.hatch ??= stripes(context);
    this.dots ??= dots(context);
  }

  private lanes(
    { width, height }: Surface,
    row: Row,
    scrollTop: number,
    nsPerPixel: number,
    x: (time: number) => number,
    labels: number[],
    incomplete: number[],
    recomputed: number[],
  ): void {
    const { store, palette } = this;
    const { spans } = store.trace;
    const { start, end } = store.window.value;
    const metrics = store.metrics.value;
    const wanted = store.wanted.value;
    for (let depth = 0; depth < row.depths; depth++) {
      const top = laneTop(row, depth, metrics) - scrollTop;
      if (top + metrics.lane < 0 || top > height) continue;
      visible(store.lanes[row.index][depth], spans, start, end, nsPerPixel, wanted, (span, from, to, merged) => {
        const left = Math.max(x(from), -8);
        const right = Math.min(Math.max(x(to), x(from) + 1), width + 8);
        const wide = right - left;
        if (wide <= 0) return;
        const box = wide > GAP_FROM ? wide - 1 : wide;
        const name = spans.name[span];
        const batch = wanted && !wanted[name] ? this.dimmed : this.batches;
        batch[palette.ofName[name]].push(left, top, box);
        if (merged > 1) return;
        if (spans.phase[span] === RECOMPUTE) recomputed.push(left, top, box);
        if (!spans.complete[span]) incomplete.push(left, top, box);
        if (wide >= LABEL_FROM) labels.push(span, Math.max(left, 0), top, Math.min(right, width) - 1);
      });
    }
  }

  private flush(context: CanvasRenderingContext2D): void {
    const lane = this.store.metrics.value.lane - 1;
    for (const [batches, alpha] of [[this.dimmed, 0.22], [this.batches, 1]] as const) {
      context.globalAlpha = alpha;
      batches.forEach((boxes, color) => {
        if (!boxes.length) return;
        context.fillStyle = this.palette.fills[color];
        for (let i = 0; i < boxes.length; i += 3) context.fillRect(boxes[i], boxes[i + 1], boxes[i + 2], lane);
        boxes.length = 0;
      });
    }
    context.globalAlpha = 1;
  }

  private labels(context: CanvasRenderingContext2D, labels: number[], lane: number, paints: Paints): void {
    const { store, palette } = this;
    const { spans, names } = store.trace;
    const wanted = store.wanted.value;
    for (let i = 0; i < labels.length; i += 4) {
      const name = spans.name[labels[i]];
      const [left, top, right] = [labels[i + 1], labels[i + 2], labels[i + 3]];
      const { text, width } = this.fitter!.fit(names[name].label, right - left - 6);
      if (!text) continue;
      const color = palette.ofName[name];
      const at = Math.round((left + right - width) / 2);
      const faded = wanted && !wanted[name];
      if (!faded && (!spans.complete[labels[i]] || spans.phase[labels[i]] === RECOMPUTE)) {
        // Stripes and dots would cross the letters.
        context.fillStyle = palette.fills[color];
        context.fillRect(at - 3, top, width + 6, lane);
      }
      context.fillStyle = faded ? paints.muted : palette.inks[color];
      context.fillText(text, at, top + lane / 2 + 0.5);
    }
  }

  private counter({ context, width }: Surface, row: Row, scrollTop: number, x: (time: number) => number, paints: Paints): void {
    const counter = this.store.trace.counters[row.index];
    const { start, end } = this.store.window.value;
    const most = highest(counter);
    const floor = row.top + row.height - scrollTop - 1;
    const tall = row.height - this.store.metrics.value.gap;
    const first = Math.max(lowerBound(counter.time, start) - 1, 0);
    context.fillStyle = paints.counter;
    for (let i = first; i < counter.time.length && counter.time[i] <= end; ) {
      const left = Math.max(x(counter.time[i]), 0);
      let value = counter.value[i];
      // Of the samples that fall on one pixel the highest is shown.
      for (i++; i < counter.time.length && x(counter.time[i]) <= left; i++) value = Math.max(value, counter.value[i]);
      // The last value holds until the end.
      const right = Math.min(x(i < counter.time.length ? counter.time[i] : this.store.bounds.end), width);
      const high = most > 0 ? Math.max((value / most) * tall, 0) : 0;
      context.globalAlpha = 0.35;
      context.fillRect(left, floor - high, Math.max(right - left, 1), high);
      context.globalAlpha = 1;
      context.fillRect(left, floor - high, Math.max(right - left, 1), 1.5);
    }
  }

  private marks({ context, width, height }: Surface, x: (time: number) => number, paints: Paints): void {
    const { marks } = this.store.trace;
    const { start, end } = this.store.window.value;
    const stride = markStride(marks, (end - start) / width, MARK_PIXELS);
    context.fillStyle = paints.mark;
    for (let i = 0; i < marks.length; i += stride) {
      const at = x(marks[i].time);
      if (at >= 0 && at <= width) context.fillRect(at, 0, 1, height);
    }
  }

  private range({ context, width, height }: Surface, x: (time: number) => number, paints: Paints): void {
    const range = this.store.range.value;
    if (!range) return;
    const [left, right] = [Math.max(x(range.start), -2), Math.min(x(range.end), width + 2)];
    if (right < 0 || left > width) return;
    context.fillStyle = paints.range;
    context.fillRect(left, 0, right - left, height);
    context.fillStyle = paints.accent;
    context.fillRect(left, 0, 1, height);
    context.fillRect(right - 1, 0, 1, height);
  }

  private selection(surface: Surface, scrollTop: number, x: (time: number) => number, paints: Paints, hovered: number): void {
    const { store } = this;
    const { context, width } = surface;
    const outline = (span: number, color: string, line: number) => {
      const box = this.box(span, scrollTop, x, width);
      if (!box) return;
      context.strokeStyle = color;
      context.lineWidth = line;
      context.strokeRect(box.left + line / 2 - 1, box.top - 1 + line / 2, Math.max(box.wide - line + 1, 1), box.high + 1 - line + 1);
    };
    if (hovered >= 0 && hovered !== store.selected.value) outline(hovered, paints.ink, 1);
    const span = store.selected.value;
    if (span < 0) return;
    this.flows(surface, span, scrollTop, x, paints);
    for (const half of store.halves(span)) if (half !== span) outline(half, paints.flow, 2);
    outline(span, paints.accent, 2.5);
  }

  /** Arrows from the forward of the selected call to each slice of its backward. */
  private flows({ context, width }: Surface, selected: number, scrollTop: number, x: (time: number) => number, paints: Paints): void {
    const { spans } = this.store.trace;
    const halves = this.store.halves(selected);
    const kind = (span: number) => this.store.trace.tracks[spans.track[span]].kind;
    const sources = halves.filter((span) => kind(span) === "forward");
    const targets = halves.filter((span) => kind(span) !== "forward");
    context.strokeStyle = context.fillStyle = paints.flow;
    context.lineWidth = 2;
    for (const source of sources) {
      for (const target of targets) {
        const from = this.box(source, scrollTop, x, width, false);
        const to = this.box(target, scrollTop, x, width, false);
        if (!from || !to) continue;
        const [x0, y0] = [from.right, from.top + from.high / 2];
        const [x1, y1] = [to.left, to.top + to.high / 2];
        if (Math.max(x0, x1) < -200 || Math.min(x0, x1) > width + 200) continue;
        const bend = Math.min(Math.max(Math.abs(x1 - x0) / 2, 24), 160);
        context.beginPath();
        context.moveTo(x0, y0);
        context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1 - 5, y1);
        context.stroke();
        context.beginPath();
        context.moveTo(x1, y1);
        context.lineTo(x1 - 8, y1 - 4.5);
        context.lineTo(x1 - 8, y1 + 4.5);
        context.fill();
      }
    }
  }

  /** Where a span is drawn; nothing where its row is folded away or, if `cut`, where it is out of sight. */
  private box(span: number, scrollTop: number, x: (time: number) => number, width: number, cut = true) {
    const { spans } = this.store.trace;
    const row = this.store.rows.value.find((row) => row.type === "track" && row.index === spans.track[span]);
    if (!row) return null;
    const left = Math.max(x(spans.start[span]), -1e5);
    const right = Math.min(Math.max(x(spans.end[span]), left + 1), 1e5);
    if (cut && (right < 0 || left > width)) return null;
    const edges = cut ? [Math.max(left, -4), Math.min(right, width + 4)] : [left, right];
    const metrics = this.store.metrics.value;
    return {
      left: edges[0],
      right: edges[1],
      wide: edges[1] - edges[0],
      top: laneTop(row, spans.depth[span], metrics) - scrollTop,
      high: metrics.lane - 1,
    };
  }
}

const tops = new WeakMap<CounterSeries, number>();

/** The highest value of a counter. */
export function highest(counter: CounterSeries): number {
  let most = tops.get(counter);
  if (most === undefined) {
    most = counter.value.reduce((a, b) => Math.max(a, b), 0);
    tops.set(counter, most);
  }
  return most;
}

function tile(context: CanvasRenderingContext2D, size: number, draw: (tile: CanvasRenderingContext2D) => void) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = size;
  draw(canvas.getContext("2d")!);
  return context.createPattern(canvas, "repeat");
}

/** Over slices whose begin or end is not known. */
function stripes(context: CanvasRenderingContext2D): CanvasPattern | null {
  return tile(context, 8, (part) => {
    part.strokeStyle = "rgba(255, 255, 255, 0.75)";
    part.lineWidth = 2.5;
    for (const shift of [-8, 0, 8]) {
      part.moveTo(shift - 1, 9);
      part.lineTo(shift + 9, -1);
    }
    part.stroke();
  });
}

/** Over forward calls that are run again in backward. */
function dots(context: CanvasRenderingContext2D): CanvasPattern | null {
  return tile(context, 5, (part) => {
    part.fillStyle = "rgba(0, 0, 0, 0.45)";
    part.fillRect(1, 1, 2, 2);
  });
}
