/** What each step was spent on, as `Timeline.summary()` has it: every nanosecond of a step is of exactly one part. */
import type { Step } from "./steps";

export interface StepParts {
  /** In the order in which bars are stacked, with each part's fraction of the time of all steps. */
  readonly parts: readonly { readonly name: string; readonly share: number }[];
  readonly steps: readonly Step[];
  /** Why a step was slow, in one sentence; null where it was not. */
  readonly causes: readonly (string | null)[];
  /** Nanoseconds, part by part of one step after the other. */
  readonly ns: Float64Array;
}

/** Nanoseconds of a step in each part. */
export const partsOfStep = ({ parts, ns }: StepParts, step: number): Float64Array =>
  ns.subarray(step * parts.length, (step + 1) * parts.length);

/** Indexes of the parts that a step has, the longest first. */
export function longestParts(stepParts: StepParts, step: number): number[] {
  const ns = partsOfStep(stepParts, step);
  return [...ns.keys()].filter((part) => ns[part] > 0).sort((a, b) => ns[b] - ns[a] || a - b);
}
