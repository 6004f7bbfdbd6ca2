/** Sentences about the events that a recording lost. */
import { formatCount, plural } from "../format";
import type { Trace } from "../trace/trace";
import { type BarCounts, countBars, describeBars } from "./bar-counts";

/** Numbers of bars whose start or end was not recorded. */
export const countIncomplete = (trace: Trace): BarCounts => countBars(trace, (bar) => !trace.spans.complete[bar]);

/** One sentence per kind of loss; empty if nothing was lost. */
export function reportLosses(trace: Trace): string[] {
  const { recorded = 0, overwritten = 0, torn = 0, unfinished = 0, unstarted = 0 } = trace.stats;
  const incomplete = countIncomplete(trace);
  const sentences: readonly (readonly [number, string])[] = [
    [
      overwritten,
      `${formatCount(overwritten)} of ${plural(recorded, "event")} were overwritten by newer ones: what came first is not shown.`,
    ],
    [
      torn,
      `${plural(torn, "event")} cannot be read: they were being written when the recording was read or its process died.`,
    ],
    [unstarted, `${plural(unstarted, "span")} began before the oldest event that was kept: drawn from there on.`],
    [unfinished, `${plural(unfinished, "span")} never ended: drawn to the last event.`],
    [
      incomplete.all,
      `${describeBars(incomplete)} of this timeline ${incomplete.all === 1 ? "is" : "are"} incomplete, drawn with stripes.`,
    ],
  ];
  return sentences.filter(([count]) => count > 0).map(([, sentence]) => sentence);
}
