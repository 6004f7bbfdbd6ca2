/** Two sides on one time axis: what each module took on either, and the verdict on the difference. */
import type { IntegerArray } from "./trace";

/**
 * "added" is only on the second side, "removed" only on the first. Only `modtrace diff` calls a module slower or faster: it
 * knows the noise. Of two steps, this page says that a module took longer or shorter.
 */
export const VERDICTS = ["slower", "longer", "faster", "shorter", "same", "cannot tell", "added", "removed"] as const;
export type Verdict = (typeof VERDICTS)[number];

/** One module in one phase on both sides; times are ns of self time. */
export interface Change {
  readonly fqn: string;
  readonly phase: string;
  readonly before: number;
  readonly after: number;
  /** What it takes more; with the machine's own change taken off if the sides are recordings. */
  readonly difference: number;
  /** The confidence interval of the difference; null if each side is one step, or too few recordings have the module. */
  readonly interval: readonly [low: number, high: number] | null;
  readonly callsBefore: number;
  readonly callsAfter: number;
  readonly verdict: Verdict;
}

export interface Comparison {
  /** What the two sides are called. */
  readonly titles: readonly [before: string, after: string];
  /** Sentences about the whole. */
  readonly notes: readonly string[];
  /** Largest difference first, changed ones before all others. */
  readonly changes: readonly Change[];
  /** Per span an index into `changes`, -1 for none. */
  readonly ofSpan: IntegerArray;
}

/** What takes less is shorter than clocks tell. */
const CLOCK_NS = 1000;

/** The difference as a part of what it was before; infinite where that was less than clocks tell. */
export const ratioOf = ({ before, difference }: Change): number =>
  before >= CLOCK_NS ? difference / before : difference ? Infinity : 0;

/** How often a module ran that ran more or less often, in the words of `Change.outcome` in Python; "" of any other. */
export function ranOtherwise({ callsBefore, callsAfter }: Change): string {
  if (callsBefore === callsAfter || !callsBefore || !callsAfter) return "";
  return `ran ${callsAfter} ${callsAfter === 1 ? "time" : "times"} a step instead of ${callsBefore}`;
}
