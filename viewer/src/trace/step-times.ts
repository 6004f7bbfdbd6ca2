/** Time of each step by phase and outside all modules, by the rules of `modtrace summary` (`StepTimes`). */
import { type Step, tracksOfSteps } from "./steps";
import { BACKWARD, FORWARD, RECOMPUTE, type Trace } from "./trace";

export const STEP_PARTS = ["forward", "backward", "recompute", "before", "between", "after"] as const;

export type StepPart = (typeof STEP_PARTS)[number];

/** Nanoseconds. Each moment counts once, so the parts add up to the step. */
export type StepTimes = Readonly<Record<StepPart, number>>;

interface Coverage {
  ns: number;
  first: number;
  last: number;
}

/**
 * For each step, the time covered by spans of a phase or a later one, however many of them run at once. Steps are in
 * order.
 */
function coverageOf(trace: Trace, steps: readonly Step[], phase: number): Coverage[] {
  const { spans } = trace;
  const isCounted = tracksOfSteps(trace);
  const covered = steps.map((): Coverage => ({ ns: 0, first: Infinity, last: -Infinity }));
  let first = 0;
  let until = -Infinity;
  for (let i = 0; i < spans.count; i++) {
    if (spans.phase[i] < phase || spans.end[i] <= until || !isCounted[spans.track[i]]) continue;
    const start = Math.max(spans.start[i], until);
    until = spans.end[i];
    while (first < steps.length && steps[first].end <= start) first++;
    for (let index = first; index < steps.length && steps[index].start < until; index++) {
      const [from, to] = [Math.max(start, steps[index].start), Math.min(until, steps[index].end)];
      if (to <= from) continue;
      const { ns, first: earliest } = covered[index];
      covered[index] = { ns: ns + to - from, first: Math.min(earliest, from), last: to };
    }
  }
  return covered;
}

/** Times of steps that are in order and do not overlap. */
export function stepTimesOf(trace: Trace, steps: readonly Step[]): StepTimes[] {
  const [all, backward, recompute] = [FORWARD, BACKWARD, RECOMPUTE].map((phase) => coverageOf(trace, steps, phase));
  return steps.map(({ start, end }, i) => {
    const { ns, first, last } = all[i];
    const before = Math.min(first, end) - start;
    const after = ns ? end - last : 0;
    return {
      forward: ns - backward[i].ns,
      backward: backward[i].ns - recompute[i].ns,
      recompute: recompute[i].ns,
      before,
      between: end - start - ns - before - after,
      after,
    };
  });
}
