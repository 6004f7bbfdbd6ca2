/** Memory of tensors over time and in calls, if a recording counted it, by the rules of `timeline/memory.py`. */
import { lowerBound } from "./depth-levels";
import { type CounterSeries, isGpu, type Trace } from "./trace";

/** The holders of memory at its peak. */
export interface Holders {
  /** Nanoseconds after the base. */
  readonly time: number;
  /** Fully qualified names and bytes, largest first, `other` last; their sum is the memory at the peak. */
  readonly rows: readonly (readonly [fqn: string, bytes: number])[];
}

const ALLOCATED = "allocated";
const CUDA_ALLOCATED = "cuda allocated";

/** Whether a counter shows the memory of tensors. */
export const isMemory = ({ name }: CounterSeries): boolean => name === ALLOCATED || name === CUDA_ALLOCATED;

/** Index of its last sample at or before a time; -1 before the first. A sample is valid until the next. */
export const sampleAt = ({ time }: CounterSeries, moment: number): number => lowerBound(time, moment + 0.5) - 1;

const peaks = new WeakMap<CounterSeries, number>();

/** Index of the first of its highest samples; -1 if it has none. */
export function peakOf(counter: CounterSeries): number {
  let peak = peaks.get(counter);
  if (peak === undefined) {
    peak = counter.value.reduce((best, value, i, all) => (best < 0 || value > all[best] ? i : best), -1);
    peaks.set(counter, peak);
  }
  return peak;
}

/** The highest value of a counter, at least 0. */
export const maximumOf = (counter: CounterSeries): number => Math.max(counter.value[peakOf(counter)] ?? 0, 0);

/**
 * Bytes for each span: the memory at its end ("retained") or the most inside it ("peak"), minus the memory at its
 * start. NaN: unknown.
 */
export function spanMemory({ spans, tracks, counters }: Trace, what: "retained" | "peak"): Float64Array {
  const found = new Float64Array(spans.count).fill(Number.NaN);
  const counterOf = tracks.map((track) => {
    const own = counters.filter((counter) => counter.process === track.process && isMemory(counter));
    return isGpu(track) ? undefined : (own.find(({ name }) => name === CUDA_ALLOCATED) ?? own[0]);
  });
  for (let i = 0; i < spans.count; i++) {
    const counter = counterOf[spans.track[i]];
    const first = counter ? sampleAt(counter, spans.start[i]) : -1;
    if (!counter || first < 0 || !spans.complete[i]) continue;
    const { value } = counter;
    const last = sampleAt(counter, spans.end[i]);
    let held = value[last];
    for (let sample = first; what === "peak" && sample < last; sample++) held = Math.max(held, value[sample]);
    found[i] = held - value[first];
  }
  return found;
}
