/** Paints the spans of tracks: rectangles in batches of one colour, patterns over some of them, and labels. */
import { levelTop, type Row } from "../layout/rows";
import type { Coloring, Store } from "../store";
import { forEachRectangle } from "../trace/depth-levels";
import { RECOMPUTE } from "../trace/trace";
import type { Frame } from "./frame";
import { LabelFitter } from "./label-fitter";
import { createPatterns, type Patterns } from "./patterns";

/** CSS pixels: narrower spans have no label; narrower neighbours have no gap between them. */
const MIN_LABEL_WIDTH = 22;
const MIN_GAP_WIDTH = 3;
/** Rectangles are cut this far outside the canvas, so that the cut edges are not visible. */
const BLEED = 8;
/** Opacity of spans that are not highlighted while others are. */
const DIMMED_ALPHA = 0.22;

interface Label {
  readonly span: number;
  readonly left: number;
  readonly y: number;
  readonly right: number;
}

/** Left, top and width of each rectangle, one after the other. */
type Rectangles = number[];

export class SpanBatches {
  private coloring: Coloring | undefined;
  private plain: Rectangles[] = [];
  private dimmed: Rectangles[] = [];
  private labels: Label[] = [];
  private incomplete: Rectangles = [];
  private recomputed: Rectangles = [];
  private patterns: Patterns | undefined;
  private fitter: LabelFitter | undefined;
  private font = "";

  /** Collect the visible rectangles of a track's row. */
  add(frame: Frame, row: Row): void {
    const { store, viewport, nsPerPixel, scrollTop, height, width, x } = frame;
    const { ofSpan } = this.useColoring(store);
    const { spans } = store.trace;
    const metrics = store.metrics.value;
    const highlighted = store.highlighted.value;
    for (let depth = 0; depth < row.depths; depth++) {
      const y = levelTop(row, depth, metrics) - scrollTop;
      if (y + metrics.level < 0 || y > height) continue;
      const level = store.levels[row.index][depth];
      forEachRectangle(
        level,
        spans,
        viewport.start,
        viewport.end,
        nsPerPixel,
        highlighted,
        (span, from, to, merged) => {
          // Merged spans fill each pixel that they touch; otherwise gaps thinner than a pixel would show in some
          // places.
          const begin = x(from, merged > 1 ? Math.floor : Math.round);
          const end = x(to, merged > 1 ? Math.ceil : Math.round);
          const left = Math.max(begin, -BLEED);
          const right = Math.min(Math.max(end, begin + 1), width + BLEED);
          const full = right - left;
          if (full <= 0) return;
          const drawn = full > MIN_GAP_WIDTH ? full - 1 : full;
          const batch = highlighted && !highlighted[span] ? this.dimmed : this.plain;
          batch[ofSpan(span)].push(left, y, drawn);
          if (merged > 1) return;
          if (spans.phase[span] === RECOMPUTE) this.recomputed.push(left, y, drawn);
          if (!spans.complete[span]) this.incomplete.push(left, y, drawn);
          if (full < MIN_LABEL_WIDTH) return;
          this.labels.push({ span, left: Math.max(left, 0), y, right: Math.min(right, width) - 1 });
        },
      );
    }
  }

  /** Paint the collected rectangles, and clear the lists. */
  paint(frame: Frame): void {
    const { context, store, colors } = frame;
    const height = store.metrics.value.level - 1;
    const font = `${Math.round(store.metrics.value.level * 0.7)}px ${colors.spanFont}`;
    context.font = font;
    context.textBaseline = "middle";
    if (font !== this.font || !this.fitter) {
      this.font = font;
      this.fitter = new LabelFitter(context);
    }
    this.patterns ??= createPatterns(context);
    this.fillBatches(context, this.dimmed, DIMMED_ALPHA, height);
    this.fillBatches(context, this.plain, 1, height);
    fillRectangles(context, this.recomputed, this.patterns.recompute, height);
    fillRectangles(context, this.incomplete, this.patterns.incomplete, height);
    for (const label of this.labels) this.paintLabel(frame, label, height);
    this.labels = [];
  }

  private useColoring(store: Store): Coloring {
    const coloring = store.coloring.value;
    if (coloring !== this.coloring) {
      this.coloring = coloring;
      this.plain = coloring.colors.map(() => []);
      this.dimmed = coloring.colors.map(() => []);
    }
    return coloring;
  }

  private fillBatches(context: CanvasRenderingContext2D, batches: Rectangles[], alpha: number, height: number): void {
    context.globalAlpha = alpha;
    batches.forEach((rectangles, color) => {
      fillRectangles(context, rectangles, this.coloring!.colors[color].fill, height);
    });
    context.globalAlpha = 1;
  }

  private paintLabel({ context, store, colors }: Frame, { span, left, y, right }: Label, height: number): void {
    const { spans, names } = store.trace;
    const highlighted = store.highlighted.value;
    const { text, width } = this.fitter!.fit(names[spans.name[span]].label, right - left - 6);
    if (!text) return;
    const color = this.coloring!.colors[this.coloring!.ofSpan(span)];
    const x = Math.round((left + right - width) / 2);
    const dimmed = highlighted && !highlighted[span];
    if (!dimmed && (!spans.complete[span] || spans.phase[span] === RECOMPUTE)) {
      // Stripes and dots would make the letters hard to read.
      context.fillStyle = color.fill;
      context.fillRect(x - 3, y, width + 6, height);
    }
    context.fillStyle = dimmed ? colors.muted : color.ink;
    context.fillText(text, x, y + height / 2 + 0.5);
  }
}

/** Fill the rectangles, and empty their list. */
function fillRectangles(
  context: CanvasRenderingContext2D,
  rectangles: Rectangles,
  style: string | CanvasPattern,
  height: number,
): void {
  if (!rectangles.length) return;
  context.fillStyle = style;
  for (let i = 0; i < rectangles.length; i += 3) {
    context.fillRect(rectangles[i], rectangles[i + 1], rectangles[i + 2], height);
  }
  rectangles.length = 0;
}
