/** From one slice to the next: along its lane, to its parent, to its first child, to the other calls of its module. */
import { type Lane, lowerBound } from "./lanes";
import type { Spans } from "./trace";

export type Direction = "left" | "right" | "up" | "down";

/** The neighbour of a span, or -1; from nothing (-1) to the first slice of all. */
export function neighbour(spans: Spans, lanes: readonly (readonly Lane[])[], span: number, to: Direction): number {
  if (span < 0) return spans.count ? 0 : -1;
  if (to === "up") return spans.parent[span];
  const depths = lanes[spans.track[span]];
  if (to === "down") {
    const below = depths[spans.depth[span] + 1]?.spans ?? [];
    const child = below[lowerBound(below, span)] ?? -1;
    return child >= 0 && spans.parent[child] === span ? child : -1;
  }
  const lane = depths[spans.depth[span]].spans;
  return lane[lowerBound(lane, span) + (to === "right" ? 1 : -1)] ?? -1;
}

/** The slices of the same name and phase as a span, and where it stands among them. */
export function alike(spans: Spans, span: number): { readonly all: readonly number[]; readonly at: number } {
  const all: number[] = [];
  for (let i = 0; i < spans.count; i++) {
    if (spans.name[i] === spans.name[span] && spans.phase[i] === spans.phase[span]) all.push(i);
  }
  return { all, at: all.indexOf(span) };
}
