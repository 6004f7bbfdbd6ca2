/** Training steps: the stretches between marks of kind "step", each of which is the end of one. */
import { extent, type Trace, type Window } from "./trace";

export interface Step extends Window {
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

/** The step in whose stretch a time lies; the number of steps where it is after the last. */
export function stepAt(steps: readonly Step[], time: number): number {
  const at = steps.findIndex((step) => time < step.end);
  return at < 0 ? steps.length : at;
}
