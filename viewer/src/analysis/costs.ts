/** Memory and FLOPs of spans, as numbers and as shades. */
import { formatFlopRate, formatQuantity } from "../format";
import { spanMemory } from "../trace/memory";
import { isGpu, PHASES, type Trace } from "../trace/trace";

export const COSTS = ["retained", "peak", "flops"] as const;
export type Cost = (typeof COSTS)[number];
export const COST_NAMES: Readonly<Record<Cost, string>> = {
  retained: "Retained",
  peak: "Peak inside",
  flops: "FLOP/s",
};
export const isCost = (text: string): text is Cost => COSTS.some((cost) => cost === text);

const UNKNOWN = "unknown";

/** Devices and dtypes of the counted operators, such as `cpu float32`; for a comparison, those of both sides. */
const dtypesOf = ({ metadata }: Trace): string[] =>
  Object.entries(metadata)
    .filter(([key]) => key.split(" ")[0] === "flops")
    .flatMap(([, flops]) => Object.keys((flops as { dtypes?: object } | null)?.dtypes ?? {}));

/** Whether the trace has FLOPs of spans, and the devices that computed them. */
export const hasFlops = (trace: Trace): boolean =>
  dtypesOf(trace).length > 0 && Object.values(trace.spanArgs).some((args) => "flops" in args);

/** Cost of each span, in bytes or FLOP/s; NaN if unknown. */
export const costsOf = (trace: Trace, cost: Cost): Float64Array =>
  cost === "flops" ? flopRates(trace) : spanMemory(trace, cost);

/**
 * FLOP/s of each call and phase: FLOPs divided by the time on streams if the work ran on a device, otherwise by the
 * time on threads, without nested spans of other phases. All spans of one call and phase have the same value.
 */
function flopRates(trace: Trace): Float64Array {
  const { spans, tracks, names, processes, spanArgs } = trace;
  const onDevice = dtypesOf(trace).some((dtype) => !dtype.startsWith("cpu "));
  const isTimed = tracks.map((track) => isGpu(track) === onDevice);
  const phaseCount = processes.length * names.length * PHASES.length;
  const calls = new Map<number, number>();
  const callOf = new Int32Array(spans.count);
  const [flops, ns] = [new Float64Array(spans.count), new Float64Array(spans.count)];
  for (let i = 0; i < spans.count; i++) {
    const name = tracks[spans.track[i]].process * names.length + spans.name[i];
    const key = spans.call[i] * phaseCount + name * PHASES.length + spans.phase[i];
    callOf[i] = calls.get(key) ?? i;
    calls.set(key, callOf[i]);
    const counted = spanArgs[i]?.flops;
    if (counted) flops[callOf[i]] += counted === UNKNOWN ? Number.NaN : Number(counted);
    if (!isTimed[spans.track[i]]) continue;
    const took = spans.complete[i] ? spans.end[i] - spans.start[i] : Number.NaN;
    ns[callOf[i]] += took;
    let outer = spans.parent[i];
    if (outer < 0 || spans.phase[outer] === spans.phase[i]) continue;
    for (; outer >= 0; outer = spans.parent[outer]) {
      if (spans.phase[outer] !== spans.phase[i]) ns[callOf[outer]] -= took;
    }
  }
  return Float64Array.from(callOf, (call) => (flops[call] && ns[call] ? (flops[call] / ns[call]) * 1e9 : Number.NaN));
}

export const formatCost = (cost: Cost, value: number): string =>
  Number.isNaN(value) ? UNKNOWN : cost === "flops" ? formatFlopRate(value) : formatQuantity(value, "bytes");

/** Number of shades for a positive cost, and again for a negative one (freed memory). */
export const SHADES = 10;

/**
 * The shade of a value: 1 to `SHADES`, which is that of `most`. Each shade of memory means twice the bytes of the
 * previous one, because a module contains the memory of its inner modules; shades of FLOP/s have equal widths. Negative
 * values have negative shades; 0 has shade 0.
 */
export function shadeOf(cost: Cost, value: number, most: number): number {
  const part = Math.abs(value) / most;
  const shade = Math.ceil(cost === "flops" ? SHADES * part : SHADES + Math.log2(part));
  return value ? Math.sign(value) * Math.max(shade, 1) : 0;
}
