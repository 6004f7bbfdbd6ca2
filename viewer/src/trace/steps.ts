/** Training steps: the ranges of time between marks of kind "step", each of which ends one. */
import { extent, type TimeRange, type Trace } from "./trace";

export interface Step extends TimeRange {
  readonly name: string;
}

/** Steps in time order; what runs after the last mark belongs to none. */
export function stepsOf(trace: Trace): Step[] {
  let start = extent(trace).start;
  return trace.marks
    .filter((mark) => mark.kind === "step")
    .map((mark, i) => {
      const step = { start, end: mark.time, name: mark.text || `step ${i}` };
      start = mark.time;
      return step;
    });
}

/** Index of the step in which a time lies; the number of steps where it is after the last. */
export function stepAt(steps: readonly Step[], time: number): number {
  const index = steps.findIndex((step) => time < step.end);
  return index < 0 ? steps.length : index;
}
