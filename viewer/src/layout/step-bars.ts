/** Positions of the step bars: one bar per step, or one for several steps if there is no room for each. */

export interface StepBar {
  /** Indexes of the steps of this bar. */
  readonly first: number;
  readonly last: number;
  /** Index of the slowest of them. Only it is drawn, so a slow step is visible however many steps there are. */
  readonly slowest: number;
}

/** Minimum and maximum CSS pixels from one bar to the next. */
export const MIN_BAR_PX = 4;
export const MAX_BAR_PX = 40;
/** Steps that take more than this many medians are cut off, so that one slow step does not flatten the others. */
const MAX_MEDIANS = 4;

/** The bars for steps with these durations, in a width in CSS pixels. */
export function barsOf(durations: readonly number[], width: number): StepBar[] {
  const count = Math.min(durations.length, Math.max(Math.floor(width / MIN_BAR_PX), 1));
  return Array.from({ length: count }, (_, bar) => {
    const first = Math.floor((bar * durations.length) / count);
    const last = Math.floor(((bar + 1) * durations.length) / count) - 1;
    let slowest = first;
    for (let step = first; step <= last; step++) if (durations[step] > durations[slowest]) slowest = step;
    return { first, last, slowest };
  });
}

/** CSS pixels from one bar to the next. */
export const barPitch = (bars: number, width: number): number => Math.min(width / Math.max(bars, 1), MAX_BAR_PX);

/** The duration in ns of the highest bar. */
export function fullHeightNs(durations: readonly number[]): number {
  const ascending = Float64Array.from(durations).sort();
  const longest = ascending[ascending.length - 1] ?? 0;
  const median = ascending[Math.floor((ascending.length - 1) / 2)] ?? 0;
  return median > 0 ? Math.min(longest, median * MAX_MEDIANS) : longest;
}

/** Index of the bar that contains a step. */
export const barOfStep = (bars: readonly StepBar[], step: number): number => bars.findIndex(({ last }) => step <= last);
