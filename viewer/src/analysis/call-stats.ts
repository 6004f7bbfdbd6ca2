/** Durations of the calls of a module or class: the spread that a total hides. */

import { medianOf } from "../trace/steps";
import { PHASES, type TimeRange, type Trace } from "../trace/trace";
import { type Device, forEachSpanInRange } from "./spans-in-range";
import { forEachInterrupted, type Groups } from "./totals";

export interface CallStats {
  readonly phase: (typeof PHASES)[number];
  readonly calls: number;
  /** Nanoseconds: the minimum, the median, the 95th percentile, and the maximum. */
  readonly min: number;
  readonly p50: number;
  readonly p95: number;
  readonly max: number;
  /** Index of the longest span. */
  readonly longest: number;
  /** Calls per bin; bins are equally wide on a logarithmic scale from the shortest to the longest call of all phases. */
  readonly bins: readonly number[];
}

const BIN_COUNT = 24;

/** The nearest-rank percentile of ascending values. */
export const percentile = (ascending: ArrayLike<number>, percent: number): number =>
  ascending[Math.max(Math.ceil((percent / 100) * ascending.length) - 1, 0)];

/** The bin of a duration among `BIN_COUNT`. */
export function binOf(ns: number, min: number, max: number): number {
  if (max <= min) return 0;
  const fraction = Math.log(Math.max(ns, 1) / Math.max(min, 1)) / Math.log(max / Math.max(min, 1));
  return Math.min(Math.floor(fraction * BIN_COUNT), BIN_COUNT - 1);
}

/**
 * Statistics of the calls of a group that overlap the range, for each phase with calls. A span inside another of the
 * same group and phase is part of that call and is not counted; spans of other phases inside are not subtracted.
 * Durations are not cut at the ends of the range.
 */
export function callStats(
  trace: Trace,
  groups: Groups,
  group: number,
  device: Device,
  range: TimeRange | null,
): CallStats[] {
  const { spans } = trace;
  const byPhase: number[][] = PHASES.map(() => []);
  forEachSpanInRange(trace, device, range, (i) => {
    if (groups.ofName[spans.name[i]] === group && !groups.nested[i]) byPhase[spans.phase[i]].push(i);
  });
  const inPhase = new Map(byPhase.flat().map((i) => [i, spans.end[i] - spans.start[i]]));
  for (let i = 0; i < spans.count; i++) {
    forEachInterrupted(spans, i, (outer) => {
      const ns = inPhase.get(outer);
      if (ns !== undefined) inPhase.set(outer, ns - (spans.end[i] - spans.start[i]));
    });
  }
  const durationOf = (i: number) => inPhase.get(i)!;
  const all = byPhase.flat().map(durationOf);
  const min = all.reduce((a, b) => Math.min(a, b), Infinity);
  const max = all.reduce((a, b) => Math.max(a, b), 0);
  return PHASES.flatMap((phase, index) => {
    const members = byPhase[index];
    if (!members.length) return [];
    const durations = Float64Array.from(members, durationOf).sort();
    const bins = new Array<number>(BIN_COUNT).fill(0);
    for (const ns of durations) bins[binOf(ns, min, max)]++;
    return {
      phase,
      calls: members.length,
      min: durations[0],
      p50: medianOf(durations),
      p95: percentile(durations, 95),
      max: durations[durations.length - 1],
      longest: members.reduce((best, i) => (durationOf(i) > durationOf(best) ? i : best)),
      bins,
    };
  });
}
