/** Numbers of bars by kind: spans of modules, backward passes, collectives and ranges. */
import { plural } from "../format";
import { isOfModules, type Trace } from "../trace/trace";

export interface BarCounts {
  readonly all: number;
  readonly spans: number;
  /** Whole backward passes. */
  readonly passes: number;
  /** Calls of torch.distributed and waits for them. */
  readonly communication: number;
  /** Ranges: named work of threads. */
  readonly ranges: number;
}

const COUNTED_AS = new Map<string, "passes" | "communication" | "ranges">([
  ["backward pass", "passes"],
  ["communication", "communication"],
  ["ranges", "ranges"],
]);

/** Count the bars of a trace, by index, for which `isCounted` holds. */
export function countBars({ spans, tracks }: Trace, isCounted: (bar: number) => boolean): BarCounts {
  const perTrack = new Array<number>(tracks.length).fill(0);
  for (let i = 0; i < spans.count; i++) if (isCounted(i)) perTrack[spans.track[i]]++;
  const counts = { all: 0, spans: 0, passes: 0, communication: 0, ranges: 0 };
  tracks.forEach((track, i) => {
    counts.all += perTrack[i];
    counts[isOfModules(track) ? "spans" : (COUNTED_AS.get(track.kind) ?? "communication")] += perTrack[i];
  });
  return counts;
}

/** `425 spans, 5 backward passes`: each kind with at least one bar. */
export function describeBars({ spans, passes, communication, ranges }: BarCounts): string {
  const parts = [
    spans && plural(spans, "span"),
    passes && plural(passes, "backward pass", "backward passes"),
    communication && plural(communication, "communication call"),
    ranges && plural(ranges, "range"),
  ];
  return parts.filter(Boolean).join(", ") || plural(0, "span");
}
