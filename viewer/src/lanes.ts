/** One lane per track and depth: what lies in it, sorted, and what of it a window shows. */
import type { Spans } from "./trace";

export interface Lane {
  /** Indexes of its spans, in start order. */
  readonly spans: Int32Array;
  /** The latest end of these and all before, so that a search by end is sound even where slices overlap. */
  readonly reach: Float64Array;
}

/** Lanes by track, then depth. */
export function lanesOf(spans: Spans, tracks: number): Lane[][] {
  const sizes: number[][] = Array.from({ length: tracks }, () => []);
  for (let i = 0; i < spans.count; i++) {
    const depths = sizes[spans.track[i]];
    while (depths.length <= spans.depth[i]) depths.push(0);
    depths[spans.depth[i]]++;
  }
  const lanes = sizes.map((depths) =>
    depths.map((size) => ({ spans: new Int32Array(size), reach: new Float64Array(size) })),
  );
  const filled = sizes.map((depths) => depths.map(() => 0));
  for (let i = 0; i < spans.count; i++) {
    const [track, depth] = [spans.track[i], spans.depth[i]];
    const lane = lanes[track][depth];
    const at = filled[track][depth]++;
    lane.spans[at] = i;
    lane.reach[at] = at ? Math.max(lane.reach[at - 1], spans.end[i]) : spans.end[i];
  }
  return lanes;
}

/** The first position whose value is at least `wanted`, in an ascending array. */
export function lowerBound(values: ArrayLike<number>, wanted: number): number {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** What is drawn as one rectangle: `span` alone where `merged` is 1, else the one that stands for all of them. */
export type Emit = (span: number, start: number, end: number, merged: number) => void;

/** The size of the cells in which slices thinner than a pixel are merged: a power of two, at least a pixel. */
export const cellSize = (nsPerPixel: number): number => 2 ** Math.ceil(Math.log2(Math.max(nsPerPixel, 1e-3)));

/**
 * Emit the rectangles of a lane between two times. Slices shorter than a cell that begin in the same cell become one
 * rectangle; cells lie on a fixed grid in time, so that nothing flickers while the window moves. A wanted
 * slice stands for its cell, else the longest.
 */
export function visible(
  lane: Lane,
  spans: Spans,
  from: number,
  to: number,
  nsPerPixel: number,
  wanted: Uint8Array | null,
  emit: Emit,
): void {
  const { start, end, name } = spans;
  const cell = cellSize(nsPerPixel);
  const count = lane.spans.length;
  // A merged rectangle may begin in a cell that the window cuts: begin with that whole cell.
  let at = lowerBound(lane.reach, Math.floor(from / cell) * cell);
  while (at < count) {
    const first = lane.spans[at];
    if (start[first] > to) return;
    if (end[first] - start[first] >= cell) {
      emit(first, start[first], end[first], 1);
      at++;
      continue;
    }
    const limit = (Math.floor(start[first] / cell) + 1) * cell;
    let best = first;
    let bestLength = -1;
    let until = end[first];
    let merged = 0;
    for (; at < count; at++) {
      const span = lane.spans[at];
      const length = end[span] - start[span];
      if (start[span] >= limit || length >= cell) break;
      merged++;
      if (end[span] > until) until = end[span];
      const worth = wanted !== null && wanted[name[span]] ? length + cell : length;
      if (worth > bestLength) {
        bestLength = worth;
        best = span;
      }
    }
    emit(best, start[first], until, merged);
  }
}

/** The slice of a lane at a time, or the nearest within `tolerance` ns; -1 where there is none. */
export function sliceAt(lane: Lane, spans: Spans, time: number, tolerance: number): number {
  let best = -1;
  let bestDistance = tolerance;
  for (let at = lowerBound(lane.reach, time - tolerance); at < lane.spans.length; at++) {
    const span = lane.spans[at];
    if (spans.start[span] > time + tolerance) break;
    const distance = Math.max(spans.start[span] - time, time - spans.end[span], 0);
    if (distance < bestDistance || (distance === 0 && best < 0)) {
      best = span;
      bestDistance = distance;
    }
    if (distance === 0) break;
  }
  return best;
}
