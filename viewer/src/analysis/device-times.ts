/**
 * Times on the streams of devices, if the recording has device times, by the rules of `modtrace summary`
 * (`DeviceSummary`).
 */
import { medianOf } from "../trace/steps";
import { isGpu, isOnThread, type TimeRange, type Trace } from "../trace/trace";
import { computeTotals, type Groups } from "./totals";

export interface DeviceTime {
  /** Nanoseconds that streams spent in the module, in all phases together. */
  readonly gpu: number;
  /** Share of the time from the first start to the last end of each stream, from 0 to 1. */
  readonly share: number;
  /** Median delay in ns from the start on a thread to the start on a stream; 0 if unknown. */
  readonly latency: number;
}

export interface StepDeviceTime {
  /** Share of the step with at least one stream in a module, from 0 to 1. */
  readonly busy: number;
  /** Longest gap in the step without any module on a stream, in nanoseconds. */
  readonly gap: number;
}

/**
 * Device times by group. With a range, times are cut at its ends, and only calls whose start on a stream is in it
 * count.
 */
export function deviceTimes(trace: Trace, groups: Groups, range: TimeRange | null): Map<number, DeviceTime> {
  const latencies = latenciesOf(trace, groups, range);
  const lengthNs = streamsLength(trace, range);
  return new Map(
    computeTotals(trace, groups, "gpu", range).map(({ group, total }) => {
      const sorted = Float64Array.from(latencies.get(group) ?? []).sort();
      const latency = sorted.length ? Math.floor(medianOf(sorted)) : 0;
      return [group, { gpu: total, share: lengthNs ? total / lengthNs : 0, latency }];
    }),
  );
}

function streamsLength({ spans, tracks }: Trace, range: TimeRange | null): number {
  const [from, to] = range ? [range.start, range.end] : [-Infinity, Infinity];
  const ends = new Map<number, readonly [number, number]>();
  for (let i = 0; i < spans.count; i++) {
    const track = spans.track[i];
    if (!isGpu(tracks[track]) || spans.start[i] >= to || spans.end[i] < from) continue;
    const [first, last] = ends.get(track) ?? [Math.max(spans.start[i], from), -Infinity];
    ends.set(track, [first, Math.max(last, Math.min(spans.end[i], to))]);
  }
  return [...ends.values()].reduce((sum, [first, last]) => sum + last - first, 0);
}

/** For each call and phase the first span counts, on threads and on streams. */
function latenciesOf({ spans, tracks }: Trace, groups: Groups, range: TimeRange | null): Map<number, number[]> {
  const begun = new Map<string, number>();
  const reached = new Map<string, number>();
  for (let i = spans.count - 1; i >= 0; i--) {
    const track = tracks[spans.track[i]];
    const key = `${spans.name[i]} ${spans.call[i]} ${spans.phase[i]}`;
    if (isGpu(track)) reached.set(key, i);
    else if (isOnThread(track)) begun.set(key, spans.start[i]);
  }
  const found = new Map<number, number[]>();
  for (const [key, i] of reached) {
    const [start, since] = [spans.start[i], begun.get(key)];
    if (since === undefined || (range && (start < range.start || start >= range.end))) continue;
    const group = groups.ofName[spans.name[i]];
    // Within the error of the clock, the device can appear to start before the host.
    found.set(group, [...(found.get(group) ?? []), Math.max(start - since, 0)]);
  }
  return found;
}

/** Device times of steps that are in order and do not overlap. */
export function stepDeviceTimes({ spans, tracks }: Trace, steps: readonly TimeRange[]): StepDeviceTime[] {
  const found = steps.map(() => ({ ns: 0, gap: 0 }));
  /** For each step, the time up to which it is already counted. */
  const reach = steps.map(({ start }) => start);
  let first = 0;
  for (let i = 0; i < spans.count; i++) {
    if (!isGpu(tracks[spans.track[i]])) continue;
    while (first < steps.length && steps[first].end <= spans.start[i]) first++;
    for (let index = first; index < steps.length && steps[index].start < spans.end[i]; index++) {
      const from = Math.max(spans.start[i], reach[index]);
      const to = Math.min(spans.end[i], steps[index].end);
      if (to <= from) continue;
      found[index].gap = Math.max(found[index].gap, from - reach[index]);
      found[index].ns += to - from;
      reach[index] = to;
    }
  }
  return steps.map(({ start, end }, index) => ({
    busy: end > start ? found[index].ns / (end - start) : 0,
    gap: Math.max(found[index].gap, end - reach[index]),
  }));
}
