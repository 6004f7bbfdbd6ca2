/** The spans of one track at one depth, sorted, so that bisection finds the spans of a time or range. */
import type { Spans } from "./trace";

export interface DepthLevel {
  /** Indexes of its spans, in start order. */
  readonly spans: Int32Array;
  /** For each span the latest end up to it; ascending, so that a search by end works even if spans overlap. */
  readonly latestEnd: Float64Array;
}

/** Build the levels, indexed by track and then by depth. */
export function buildDepthLevels(spans: Spans, trackCount: number): DepthLevel[][] {
  const sizes: number[][] = Array.from({ length: trackCount }, () => []);
  for (let i = 0; i < spans.count; i++) {
    const depths = sizes[spans.track[i]];
    while (depths.length <= spans.depth[i]) depths.push(0);
    depths[spans.depth[i]]++;
  }
  const levels = sizes.map((depths) =>
    depths.map((size) => ({ spans: new Int32Array(size), latestEnd: new Float64Array(size) })),
  );
  const filled = sizes.map((depths) => depths.map(() => 0));
  for (let i = 0; i < spans.count; i++) {
    const [track, depth] = [spans.track[i], spans.depth[i]];
    const level = levels[track][depth];
    const position = filled[track][depth]++;
    level.spans[position] = i;
    level.latestEnd[position] = position ? Math.max(level.latestEnd[position - 1], spans.end[i]) : spans.end[i];
  }
  return levels;
}

/** The first position in an ascending array whose value is at least `limit`; the length if there is none. */
export function lowerBound(values: ArrayLike<number>, limit: number): number {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < limit) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Receives one rectangle: of `span` if `merged` is 1, otherwise of `merged` spans that include `span`. */
export type DrawSpan = (span: number, start: number, end: number, merged: number) => void;

/** Width in ns of the cells in which spans thinner than a pixel are merged: a power of two, at least a pixel. */
export const mergeCellNs = (nsPerPixel: number): number => 2 ** Math.ceil(Math.log2(Math.max(nsPerPixel, 1e-3)));

/**
 * Call `draw` with the rectangles of a level between two times, in start order.
 *
 * Spans shorter than a merge cell that start in the same cell become one rectangle. Cells lie on a fixed grid in time,
 * so that nothing flickers while the viewport moves. The longest span of a cell is shown, unless another one is
 * highlighted (by a flag per span).
 */
export function forEachRectangle(
  level: DepthLevel,
  spans: Spans,
  from: number,
  to: number,
  nsPerPixel: number,
  highlighted: Uint8Array | null,
  draw: DrawSpan,
): void {
  const { start, end } = spans;
  const cell = mergeCellNs(nsPerPixel);
  const count = level.spans.length;
  // A merged rectangle may start before `from`, in the cell that contains `from`: start with that whole cell.
  let position = lowerBound(level.latestEnd, Math.floor(from / cell) * cell);
  while (position < count) {
    const first = level.spans[position];
    if (start[first] > to) return;
    if (end[first] - start[first] >= cell) {
      draw(first, start[first], end[first], 1);
      position++;
      continue;
    }
    const cellEnd = (Math.floor(start[first] / cell) + 1) * cell;
    let best = first;
    let bestRank = -1;
    let mergedEnd = end[first];
    let merged = 0;
    for (; position < count; position++) {
      const span = level.spans[position];
      const duration = end[span] - start[span];
      if (start[span] >= cellEnd || duration >= cell) break;
      merged++;
      if (end[span] > mergedEnd) mergedEnd = end[span];
      const rank = highlighted?.[span] ? duration + cell : duration;
      if (rank > bestRank) {
        bestRank = rank;
        best = span;
      }
    }
    draw(best, start[first], mergedEnd, merged);
  }
}

/** The span of a level at a time, or the nearest within `toleranceNs`; -1 if there is none. */
export function spanAt(level: DepthLevel, spans: Spans, time: number, toleranceNs: number): number {
  let best = -1;
  let bestDistance = toleranceNs;
  for (let position = lowerBound(level.latestEnd, time - toleranceNs); position < level.spans.length; position++) {
    const span = level.spans[position];
    if (spans.start[span] > time + toleranceNs) break;
    const distance = Math.max(spans.start[span] - time, time - spans.end[span], 0);
    if (distance < bestDistance || (distance === 0 && best < 0)) {
      best = span;
      bestDistance = distance;
    }
    if (distance === 0) break;
  }
  return best;
}
