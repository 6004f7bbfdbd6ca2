/** The state for one painting of the tracks: the surface, the viewport and the scroll position at that time. */
import { levelTop } from "../layout/rows";
import { durationOf } from "../layout/viewport";
import type { Store } from "../store";
import type { CanvasColors } from "../theme";
import type { TimeRange } from "../trace/trace";
import type { Surface } from "./surface";

export interface Frame extends Surface {
  readonly store: Store;
  readonly colors: CanvasColors;
  readonly viewport: TimeRange;
  readonly nsPerPixel: number;
  /** CSS pixels of rows above the canvas. */
  readonly scrollTop: number;
  /** The CSS pixel of a time, on a whole device pixel: the nearest, or by another rounding. */
  readonly x: (time: number, round?: (pixels: number) => number) => number;
}

export function createFrame(store: Store, surface: Surface, scrollTop: number, colors: CanvasColors): Frame {
  const viewport = store.viewport.value;
  const { width, scale } = surface;
  const nsPerPixel = durationOf(viewport) / width;
  const x = (time: number, round = Math.round) => round(((time - viewport.start) / nsPerPixel) * scale) / scale;
  return { ...surface, store, colors, viewport, nsPerPixel, scrollTop, x };
}

/** A rectangle on the canvas, in CSS pixels. */
export interface Box {
  readonly left: number;
  readonly right: number;
  readonly top: number;
  readonly height: number;
}

/** Spans are cut this far outside the canvas, because canvases cannot draw rectangles with very distant edges. */
const MAX_X = 1e5;

/** The box of a span; null if its process is folded. */
export function spanBox({ store, scrollTop, x }: Frame, span: number): Box | null {
  const { spans } = store.trace;
  const row = store.rows.value.find(({ type, index }) => type === "track" && index === spans.track[span]);
  if (!row) return null;
  const metrics = store.metrics.value;
  const left = Math.max(x(spans.start[span]), -MAX_X);
  return {
    left,
    right: Math.min(Math.max(x(spans.end[span]), left + 1), MAX_X),
    top: levelTop(row, spans.depth[span], metrics) - scrollTop,
    height: metrics.level - 1,
  };
}
