/** Paints a counter's row: its value over time as a filled step line. */
import type { Row } from "../layout/rows";
import { lowerBound } from "../trace/depth-levels";
import type { CounterSeries } from "../trace/trace";
import type { Frame } from "./frame";

const LINE_HEIGHT = 1.5;
const FILL_ALPHA = 0.35;

const maxima = new WeakMap<CounterSeries, number>();

/** The highest value of a counter, at least 0. */
export function maximumOf(counter: CounterSeries): number {
  let maximum = maxima.get(counter);
  if (maximum === undefined) {
    maximum = counter.value.reduce((a, b) => Math.max(a, b), 0);
    maxima.set(counter, maximum);
  }
  return maximum;
}

export function paintCounter({ context, store, colors, viewport, width, scrollTop, x }: Frame, row: Row): void {
  const { time, value } = store.trace.counters[row.index];
  const maximum = maximumOf(store.trace.counters[row.index]);
  const bottom = row.top + row.height - scrollTop - 1;
  const fullHeight = row.height - store.metrics.value.gap;
  // The sample before the viewport holds into it.
  const first = Math.max(lowerBound(time, viewport.start) - 1, 0);
  context.fillStyle = colors.counter;
  for (let i = first; i < time.length && time[i] <= viewport.end; ) {
    const left = Math.max(x(time[i]), 0);
    let shown = value[i];
    // Of the samples that fall on one pixel the highest is shown.
    for (i++; i < time.length && x(time[i]) <= left; i++) shown = Math.max(shown, value[i]);
    // The last value holds until the end.
    const right = Math.min(x(i < time.length ? time[i] : store.bounds.end), width);
    const height = maximum > 0 ? Math.max((shown / maximum) * fullHeight, 0) : 0;
    context.globalAlpha = FILL_ALPHA;
    context.fillRect(left, bottom - height, Math.max(right - left, 1), height);
    context.globalAlpha = 1;
    context.fillRect(left, bottom - height, Math.max(right - left, 1), LINE_HEIGHT);
  }
}
