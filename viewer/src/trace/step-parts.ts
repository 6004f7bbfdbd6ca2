/**
 * The time of each step by part, equal to the parts of `Timeline.summary()`. Each nanosecond of a step belongs to
 * exactly one part.
 */
import type { Step } from "./steps";

export interface StepParts {
  /** Each part with its share of the time of all steps, in the order in which bars are stacked. */
  readonly parts: readonly { readonly name: string; readonly share: number }[];
  readonly steps: readonly Step[];
  /** The reason of a slow step in one sentence; null for other steps. */
  readonly causes: readonly (string | null)[];
  /** Nanoseconds: all parts of the first step, then all parts of the next, and so on. */
  readonly ns: Float64Array;
}

/** Nanoseconds of a step in each part. */
export const partsOfStep = ({ parts, ns }: StepParts, step: number): Float64Array =>
  ns.subarray(step * parts.length, (step + 1) * parts.length);

/** Indexes of the parts with time in a step, the longest first. */
export function longestParts(stepParts: StepParts, step: number): number[] {
  const ns = partsOfStep(stepParts, step);
  return [...ns.keys()].filter((part) => ns[part] > 0).sort((a, b) => ns[b] - ns[a] || a - b);
}
