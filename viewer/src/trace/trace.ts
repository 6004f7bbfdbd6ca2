/** A timeline in memory: columns of spans as typed arrays, and the tables that their indexes refer to. */
import type { Comparison } from "./comparison";
import type { Finding } from "./findings";
import type { Holders } from "./memory";
import type { StepParts } from "./step-parts";

export const FORWARD = 0;
export const BACKWARD = 1;
export const RECOMPUTE = 2;
export const PHASES = ["forward", "backward", "recompute"] as const;

export type IntegerArray = Int32Array | Uint8Array | Float64Array;

/** One entry per span, in start order, a parent before its children. Times are ns after `Trace.base`. */
export interface Spans {
  readonly count: number;
  readonly start: Float64Array;
  readonly end: Float64Array;
  /** Index into `Trace.names`. */
  readonly name: IntegerArray;
  /** Index into `PHASES`. */
  readonly phase: IntegerArray;
  /** Index into `Trace.tracks`. */
  readonly track: IntegerArray;
  /** Number of spans around it on its track. */
  readonly depth: IntegerArray;
  /** Index of the span around it, -1 for none. */
  readonly parent: IntegerArray;
  /** Number of the call of its module, from 0. */
  readonly call: IntegerArray;
  /** Number of its training step, from 0. */
  readonly step: IntegerArray;
  /** Equal for all spans of one call, forward and backward; -1 for none. */
  readonly link: IntegerArray;
  /** 0 if its start or its end was not recorded. */
  readonly complete: IntegerArray;
}

export interface Name {
  readonly label: string;
  /** Fully qualified name of the module. */
  readonly fqn: string;
  readonly moduleClass: string;
}

export interface Process {
  readonly pid: number;
  readonly rank: number | null;
  readonly name: string;
}

export interface Track {
  /**
   * "forward" and "backward" for threads; "gpu" for a stream of a GPU; other kinds have no modules (see `isOfModules`).
   */
  readonly kind: string;
  readonly thread: string;
  readonly tid: number;
  /** Index into `Trace.processes`. */
  readonly process: number;
  readonly name: string;
}

/** Kinds of a thread's tracks from top to bottom; the bars of the last three are not calls of modules. */
export const THREAD_KINDS = ["forward", "backward", "backward pass", "ranges", "communication"];

/** Whether the bars of a track are calls of modules. */
export const isOfModules = ({ kind }: Track): boolean => THREAD_KINDS.indexOf(kind) < 2;

/** Whether the bars of a track are calls of modules on a thread, not on a GPU. */
export const isOnThread = (track: Track): boolean => isOfModules(track) && track.kind !== "gpu";

export const isGpu = ({ kind }: Track): boolean => kind === "gpu";

/** Whether the tracks of streams are device times of the recording, not kernels of a profile. */
export const hasDeviceTimes = ({ metadata, tracks }: Trace): boolean =>
  typeof metadata.device_clock_bound_ns === "number" && tracks.some(isGpu);

export interface Mark {
  readonly time: number;
  readonly kind: string;
  readonly text: string;
}

export interface CounterSeries {
  readonly name: string;
  readonly unit: string;
  /** Index into `Trace.processes`. */
  readonly process: number;
  /** Ascending ns after the base. */
  readonly time: Float64Array;
  readonly value: Float64Array;
}

export interface Trace {
  /** Unix nanoseconds of time 0. */
  readonly base: bigint;
  readonly spans: Spans;
  readonly names: readonly Name[];
  readonly processes: readonly Process[];
  readonly tracks: readonly Track[];
  readonly marks: readonly Mark[];
  readonly counters: readonly CounterSeries[];
  readonly stats: Readonly<Record<string, number>>;
  readonly metadata: Readonly<Record<string, unknown>>;
  /** Further texts of some spans, by span index. */
  readonly spanArgs: Readonly<Record<string, Readonly<Record<string, string>>>>;
  /** The comparison, if the trace has two sides. */
  readonly comparison: Comparison | null;
  /** The time of each step by part; null if no step is known. */
  readonly stepParts: StepParts | null;
  /** The findings, the most costly first. */
  readonly findings: readonly Finding[];
  /** The sentence that there are no other findings, or none at all; empty if unknown. */
  readonly findingsEnd: string;
  /** The holders of memory at its peak; null if that was not recorded. */
  readonly holders: Holders | null;
}

/** Nanoseconds after the base. */
export interface TimeRange {
  readonly start: number;
  readonly end: number;
}

/** The range of all spans, marks and counters; never empty. */
export function extent(trace: Trace): TimeRange {
  let start = Infinity;
  let end = -Infinity;
  const include = (time: number) => {
    if (time < start) start = time;
    if (time > end) end = time;
  };
  for (let i = 0; i < trace.spans.count; i++) {
    include(trace.spans.start[i]);
    include(trace.spans.end[i]);
  }
  for (const mark of trace.marks) include(mark.time);
  for (const { time } of trace.counters) {
    if (time.length) {
      include(time[0]);
      include(time[time.length - 1]);
    }
  }
  if (start > end) return { start: 0, end: 1000 };
  return { start, end: Math.max(end, start + 1) };
}

/** Nanoseconds of a span that no child on its track covers. */
export function selfTime(spans: Spans, index: number): number {
  let ns = spans.end[index] - spans.start[index];
  // Children start after the start of their parent and before its end, and have higher indexes.
  for (let i = index + 1; i < spans.count && spans.start[i] <= spans.end[index]; i++) {
    if (spans.parent[i] === index) ns -= spans.end[i] - spans.start[i];
  }
  return ns;
}

/** The spans of each call with a link, by link. */
export function spansByLink(spans: Spans): Map<number, number[]> {
  const byLink = new Map<number, number[]>();
  for (let i = 0; i < spans.count; i++) {
    const link = spans.link[i];
    if (link < 0) continue;
    const others = byLink.get(link);
    if (others) others.push(i);
    else byLink.set(link, [i]);
  }
  return byLink;
}
