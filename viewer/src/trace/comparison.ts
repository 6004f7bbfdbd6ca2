/** Two sides on one time axis: the time of each module on both sides, and a verdict on the difference. */
import type { IntegerArray } from "./trace";

/**
 * "added" is only on the second side, "removed" only on the first. Only `modtrace diff` calls a module slower or
 * faster, because it knows the noise. For two steps, this page only says that a module took longer or shorter.
 */
export const VERDICTS = ["slower", "longer", "faster", "shorter", "same", "cannot tell", "added", "removed"] as const;
export type Verdict = (typeof VERDICTS)[number];

/** One module in one phase on both sides; times are ns of self time. */
export interface Change {
  readonly fqn: string;
  readonly phase: string;
  readonly before: number;
  readonly after: number;
  /** Time after minus time before; for recordings, corrected by the change of the machine's speed. */
  readonly difference: number;
  /**
   * The confidence interval of the difference; null if each side is one step, or if too few recordings have the module.
   */
  readonly interval: readonly [low: number, high: number] | null;
  readonly callsBefore: number;
  readonly callsAfter: number;
  readonly verdict: Verdict;
}

export interface Comparison {
  /** The names of the two sides. */
  readonly titles: readonly [before: string, after: string];
  /** Sentences about the whole comparison. */
  readonly notes: readonly string[];
  /** Changed modules before all others; both sorted by difference, largest first. */
  readonly changes: readonly Change[];
  /** For each span an index into `changes`, -1 for none. */
  readonly ofSpan: IntegerArray;
}

/** Resolution of the clock in ns; shorter times have no ratio. */
const CLOCK_NS = 1000;

/** The difference as a share of the time before; infinite if that is below the resolution of the clock. */
export const ratioOf = ({ before, difference }: Change): number =>
  before >= CLOCK_NS ? difference / before : difference ? Infinity : 0;

/** If the number of calls changed, the text of `Change.outcome` in Python; otherwise "". */
export function ranOtherwise({ callsBefore, callsAfter }: Change): string {
  if (callsBefore === callsAfter || !callsBefore || !callsAfter) return "";
  return `ran ${callsAfter} ${callsAfter === 1 ? "time" : "times"} a step instead of ${callsBefore}`;
}
