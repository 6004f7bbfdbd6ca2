/** Training steps: the ranges of time between marks of kind "step". Each mark ends one step. */
import { isOnThread, type TimeRange, type Trace } from "./trace";

export interface Step extends TimeRange {
  readonly name: string;
  /** False if its start was overwritten, or if no mark ends it: it may have been longer. */
  readonly isWhole: boolean;
}

/** Index of the process with the steps: a trace of several processes has only the marks of the first. */
export const STEP_PROCESS = 0;

/** Maximum part of a viewport beyond a step that it shows as the only one, as a fraction of the step's duration. */
const MAX_OVERHANG = 0.2;

/** For each track, whether its spans belong to steps: calls of modules on threads of the process with the steps. */
export const tracksOfSteps = ({ tracks }: Trace): boolean[] =>
  tracks.map((track) => track.process === STEP_PROCESS && isOnThread(track));

/**
 * Steps in time order, with the names of their marks. A range is a step only if a module's span starts in it, so two
 * adjacent marks have no step between them. The first step starts with the first span, or with a range before it, such
 * as data loading. Spans after the last mark are a step that has not ended.
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

/** The median duration of the whole steps in ns, or of all steps if none is whole. */
export function medianDuration(steps: readonly Step[]): number {
  const whole = steps.filter(({ isWhole }) => isWhole);
  return medianOf(Float64Array.from(whole.length ? whole : steps, ({ start, end }) => end - start).sort());
}

/** The median of ascending values; for an even number of values, the mean of the two middle ones. */
export function medianOf(ascending: ArrayLike<number>): number {
  const middle = ascending.length / 2;
  return (ascending[Math.ceil(middle) - 1] + ascending[Math.floor(middle)]) / 2;
}

/** Index of the first step that has not ended at a time; the number of steps if all have ended. */
export function stepAt(steps: readonly Step[], time: number): number {
  const index = steps.findIndex((step) => time < step.end);
  return index < 0 ? steps.length : index;
}

/** Index of the step that a viewport shows, whole or in part; -1 if it shows several steps or none. */
export function shownStep(steps: readonly Step[], viewport: TimeRange): number {
  const index = stepAt(steps, (viewport.start + viewport.end) / 2);
  if (index === steps.length) return -1;
  const { start, end } = steps[index];
  const overhang = (end - start) * MAX_OVERHANG;
  return viewport.start >= start - overhang && viewport.end <= end + overhang ? index : -1;
}

/**
 * Index of the next (`direction` 1) or previous (-1) step of a viewport. If the viewport shows several steps, the first
 * or the last of those that are wholly visible. -1 if there is none further.
 */
export function stepBeside(steps: readonly Step[], viewport: TimeRange, direction: 1 | -1): number {
  const shown = shownStep(steps, viewport);
  if (shown >= 0) return shown + direction < steps.length ? shown + direction : -1;
  return direction === 1
    ? steps.findIndex((step) => step.start >= viewport.start)
    : steps.findLastIndex((step) => step.end <= viewport.end);
}
