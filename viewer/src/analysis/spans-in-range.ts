/** The input of totals, flame graphs and spreads: spans on one device that overlap a range. */
import { isOfModules, type TimeRange, type Trace } from "../trace/trace";

export type Device = "cpu" | "gpu";

/**
 * Call `visit` with each module's span on the device that overlaps the range (null: every span), in start order, and
 * with its nanoseconds in the range.
 */
export function forEachSpanInRange(
  trace: Trace,
  device: Device,
  range: TimeRange | null,
  visit: (span: number, ns: number) => void,
): void {
  const { spans } = trace;
  const onDevice = trace.tracks.map((track) => isOfModules(track) && (track.kind === "gpu") === (device === "gpu"));
  const [from, to] = range ? [range.start, range.end] : [-Infinity, Infinity];
  for (let i = 0; i < spans.count && spans.start[i] < to; i++) {
    if (!onDevice[spans.track[i]] || spans.end[i] < from) continue;
    visit(i, Math.min(spans.end[i], to) - Math.max(spans.start[i], from));
  }
}
