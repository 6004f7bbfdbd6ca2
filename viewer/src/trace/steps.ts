/** Training steps: the ranges of time between marks of kind "step", each of which ends one. */
import { isOnThread, type TimeRange, type Trace } from "./trace";

export interface Step extends TimeRange {
  readonly name: string;
  /** False where its beginning was overwritten, or no mark ends it: it may have been longer. */
  readonly isWhole: boolean;
}

/** The process that the steps are of, as an index: of several, a trace holds the marks of the first. */
export const STEP_PROCESS = 0;

/** How far a viewport may reach beyond a step and still show this one alone, as a fraction of the step's duration. */
const MAX_OVERHANG = 0.2;

/** Per track whether its spans lie in steps: calls of modules on threads of the process that the steps are of. */
export const tracksOfSteps = ({ tracks }: Trace): boolean[] =>
  tracks.map((track) => track.process === STEP_PROCESS && isOnThread(track));

/**
 * Steps in time order, named as their marks are. Only ranges in which a module's span starts are steps: two marks directly
 * behind each other have none between them. The first begins with the first span, or with a range before it, as loading
 * data is; what starts after the last mark is a step that has not ended.
 */
export function stepsOf(trace: Trace): Step[] {
  const { spans, marks, stats } = trace;
  const isCounted = tracksOfSteps(trace);
  const counted: number[] = [];
  for (let i = 0; i < spans.count; i++) if (isCounted[spans.track[i]]) counted.push(i);
  const stepMarks = marks.filter(({ kind }) => kind === "step");
  if (!stepMarks.length || !counted.length) return [];
  const steps: Step[] = [];
  let start = spans.start[counted[0]];
  if (start < stepMarks[0].time) start = Math.min(start, trace.stepParts?.steps[0]?.start ?? start);
  let next = 0;
  for (const mark of stepMarks) {
    const first = next;
    while (next < counted.length && spans.start[counted[next]] < mark.time) next++;
    const name = mark.text || `step ${spans.step[counted[first]]}`;
    if (next > first) steps.push({ start, end: mark.time, name, isWhole: steps.length > 0 || !stats.overwritten });
    start = mark.time;
  }
  if (next < counted.length) {
    const end = counted.reduce((latest, i) => Math.max(latest, spans.end[i]), start);
    steps.push({ start, end, name: `step ${spans.step[counted[next]]}, not ended`, isWhole: false });
  }
  return steps;
}

/** The median duration of the whole steps in ns; of all where none is. */
export function medianDuration(steps: readonly Step[]): number {
  const whole = steps.filter(({ isWhole }) => isWhole);
  return medianOf(Float64Array.from(whole.length ? whole : steps, ({ start, end }) => end - start).sort());
}

/** The median of ascending values, of an even number the mean of the two middle ones. */
export function medianOf(ascending: ArrayLike<number>): number {
  const middle = ascending.length / 2;
  return (ascending[Math.ceil(middle) - 1] + ascending[Math.floor(middle)]) / 2;
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
