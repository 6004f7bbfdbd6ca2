/** Arithmetic of the viewport (the visible range of time): pure functions from a range to a range. */
import type { TimeRange } from "../trace/trace";

const MIN_VIEWPORT_NS = 20;
/** The widest viewport, as a multiple of the trace's duration. */
const MAX_VIEWPORT_FACTOR = 1.1;
/** Maximum distance of the viewport beyond the trace's ends, as a fraction of its own duration. */
const OVERSCROLL_FRACTION = 0.5;
/** Free space on both sides of a range after a zoom to it, as a fraction of its duration. */
const MARGIN_FRACTION = 0.02;
/** A range shorter than the viewport's duration divided by this is too thin to be seen. */
const MAX_THINNESS = 300;

/** Nanoseconds from start to end. */
export const durationOf = (range: TimeRange): number => range.end - range.start;

/** The time at a fraction of a range: 0 is its start, 1 its end. */
export const timeAt = (range: TimeRange, fraction: number): number => range.start + fraction * durationOf(range);

/** The intersection of two ranges; null if it is empty. */
export function overlapOf(one: TimeRange, other: TimeRange): TimeRange | null {
  const [start, end] = [Math.max(one.start, other.start), Math.min(one.end, other.end)];
  return start <= end ? { start, end } : null;
}

const centreOf = (range: TimeRange): number => timeAt(range, 0.5);

function clampDuration(ns: number, bounds: TimeRange): number {
  const widest = durationOf(bounds) * MAX_VIEWPORT_FACTOR;
  return Math.min(Math.max(ns, Math.min(MIN_VIEWPORT_NS, widest)), widest);
}

/** Keep the duration between the minimum and the maximum, and part of the trace visible. */
export function clamp(viewport: TimeRange, bounds: TimeRange): TimeRange {
  const duration = clampDuration(durationOf(viewport), bounds);
  const earliest = bounds.start - duration * OVERSCROLL_FRACTION;
  const latest = bounds.end + duration * OVERSCROLL_FRACTION;
  const start = Math.min(Math.max(centreOf(viewport) - duration / 2, earliest), latest - duration);
  return { start, end: start + duration };
}

/** Zoom by a factor (below 1 shows less). The time `fixed` keeps its place in the viewport. */
export function zoom(viewport: TimeRange, factor: number, fixed: number, bounds: TimeRange): TimeRange {
  const before = durationOf(viewport);
  const after = clampDuration(before * factor, bounds);
  const start = fixed - ((fixed - viewport.start) / before) * after;
  return clamp({ start, end: start + after }, bounds);
}

/** Move by a fraction of the viewport's own duration. */
export function pan(viewport: TimeRange, fraction: number, bounds: TimeRange): TimeRange {
  const shift = durationOf(viewport) * fraction;
  return clamp({ start: viewport.start + shift, end: viewport.end + shift }, bounds);
}

/** A viewport that shows a range with a margin on both sides. */
export function withMargin(range: TimeRange, bounds: TimeRange): TimeRange {
  const margin = Math.max(durationOf(range) * MARGIN_FRACTION, MIN_VIEWPORT_NS / 2);
  return clamp({ start: range.start - margin, end: range.end + margin }, bounds);
}

/** The viewport, moved and if necessary resized so that a range is visible and wide enough to be seen. */
export function reveal(viewport: TimeRange, range: TimeRange, bounds: TimeRange): TimeRange {
  const duration = durationOf(viewport);
  const tooThin = durationOf(range) * MAX_THINNESS < duration;
  const inSight = range.start >= viewport.start && range.end <= viewport.end;
  if (inSight && !tooThin) return viewport;
  if (tooThin || durationOf(range) > duration * 0.9) return withMargin(widen(range, duration / 20), bounds);
  const centre = centreOf(range);
  return clamp({ start: centre - duration / 2, end: centre + duration / 2 }, bounds);
}

/** The range with up to 20 times its duration around its centre, at most `maxNs`; never shorter than the range. */
function widen(range: TimeRange, maxNs: number): TimeRange {
  const duration = Math.max(durationOf(range), Math.min(durationOf(range) * 20, maxNs));
  const centre = centreOf(range);
  return { start: centre - duration / 2, end: centre + duration / 2 };
}
