/** Neighbours of a span: along its depth level, its parent, its first child, other calls of its module. */
import { type DepthLevel, lowerBound } from "./depth-levels";
import type { Spans } from "./trace";

export type Direction = "left" | "right" | "up" | "down";

/** The neighbour of a span, or -1; for no span (-1), the first span of the trace. */
export function neighbour(
  spans: Spans,
  levels: readonly (readonly DepthLevel[])[],
  span: number,
  direction: Direction,
): number {
  if (span < 0) return spans.count ? 0 : -1;
  if (direction === "up") return spans.parent[span];
  const depths = levels[spans.track[span]];
  if (direction === "down") {
    const below = depths[spans.depth[span] + 1]?.spans ?? [];
    const child = below[lowerBound(below, span)] ?? -1;
    return child >= 0 && spans.parent[child] === span ? child : -1;
  }
  const level = depths[spans.depth[span]].spans;
  return level[lowerBound(level, span) + (direction === "right" ? 1 : -1)] ?? -1;
}

/** The spans with the same name and phase as a span, in start order, and the position of the span among them. */
export function sameCall(spans: Spans, span: number): { readonly calls: readonly number[]; readonly position: number } {
  const calls: number[] = [];
  for (let i = 0; i < spans.count; i++) {
    if (spans.name[i] === spans.name[span] && spans.phase[i] === spans.phase[span]) calls.push(i);
  }
  return { calls, position: calls.indexOf(span) };
}
