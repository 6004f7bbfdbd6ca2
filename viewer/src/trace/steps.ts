/** Training steps: the ranges of time between marks of kind "step", each of which ends one. */
import { extent, type TimeRange, type Trace } from "./trace";

export interface Step extends TimeRange {
  readonly name: string;
}

/** How far a viewport may reach beyond a step and still show this one alone, as a fraction of the step's duration. */
const MAX_OVERHANG = 0.2;

/**
 * Steps in time order, named as their marks are. Only ranges in which a span starts are steps: a mark that is set before
 * the first call ends none. What starts after the last mark is a step that has not ended.
 */
export function stepsOf(trace: Trace): Step[] {
  const { spans, marks } = trace;
  const bounds = extent(trace);
  const stepMarks = marks.filter(({ kind }) => kind === "step");
  if (!stepMarks.length) return [];
  const steps: Step[] = [];
  let start = bounds.start;
  let span = 0;
  for (const mark of stepMarks) {
    const first = span;
    while (span < spans.count && spans.start[span] < mark.time) span++;
    if (span > first) steps.push({ start, end: mark.time, name: mark.text || `step ${spans.step[first]}` });
    start = mark.time;
  }
  if (span < spans.count) steps.push({ start, end: bounds.end, name: `step ${spans.step[span]}, not ended` });
  return steps;
}

/** Index of the first step that has not ended at a time; the number of steps where all have. */
export function stepAt(steps: readonly Step[], time: number): number {
  const index = steps.findIndex((step) => time < step.end);
  return index < 0 ? steps.length : index;
}

/** Index of the step that a viewport shows, whole or in part; -1 where it shows several, or none. */
export function shownStep(steps: readonly Step[], viewport: TimeRange): number {
  const index = stepAt(steps, (viewport.start + viewport.end) / 2);
  if (index === steps.length) return -1;
  const { start, end } = steps[index];
  const overhang = (end - start) * MAX_OVERHANG;
  return viewport.start >= start - overhang && viewport.end <= end + overhang ? index : -1;
}

/**
 * Index of the step to go to from a viewport: the one after (`direction` 1) or before (-1) the shown one. Where several
 * are shown, the first or the last of those that are wholly in sight. -1 where there is none further.
 */
export function stepBeside(steps: readonly Step[], viewport: TimeRange, direction: 1 | -1): number {
  const shown = shownStep(steps, viewport);
  if (shown >= 0) return shown + direction < steps.length ? shown + direction : -1;
  return direction === 1
    ? steps.findIndex((step) => step.start >= viewport.start)
    : steps.findLastIndex((step) => step.end <= viewport.end);
}
