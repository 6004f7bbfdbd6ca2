/** A timeline in memory: columns of spans as typed arrays, and the tables that they index. */
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
  /** Spans around it on its track. */
  readonly depth: IntegerArray;
  /** Index of the span around it, -1 for none. */
  readonly parent: IntegerArray;
  /** Which call of its module it is, from 0. */
  readonly call: IntegerArray;
  /** Which training step it belongs to, from 0. */
  readonly step: IntegerArray;
  /** Equal for all spans of one call, forward and backward; -1 for none. */
  readonly link: IntegerArray;
  /** 0 where its start or its end was not recorded. */
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
  /** "forward" and "backward" for threads; "gpu" for a stream of a GPU; else what `isOfModules` is false for. */
  readonly kind: string;
  readonly thread: string;
  readonly tid: number;
  /** Index into `Trace.processes`. */
  readonly process: number;
  readonly name: string;
}

/** Kinds of a thread's tracks from top to bottom; the bars of the last three are no calls of modules. */
export const THREAD_KINDS = ["forward", "backward", "backward pass", "ranges", "communication"];

/** Whether the bars of a track are calls of modules. */
export const isOfModules = ({ kind }: Track): boolean => THREAD_KINDS.indexOf(kind) < 2;

/** Whether the bars of a track are calls of modules on a thread, as against a GPU. */
export const isOnThread = (track: Track): boolean => isOfModules(track) && track.kind !== "gpu";

export const isGpu = ({ kind }: Track): boolean => kind === "gpu";

/** Whether the rows of streams are device times of the recording, and not kernels of a profile. */
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
  /** Further texts of some spans, by the span's index. */
  readonly spanArgs: Readonly<Record<string, Readonly<Record<string, string>>>>;
  /** Where it holds two sides side by side: how they differ. */
  readonly comparison: Comparison | null;
  /** What each step was spent on; null where no step is known. */
  readonly stepParts: StepParts | null;
  /** What stands out, the most costly first. */
  readonly findings: readonly Finding[];
  /** That nothing else stands out, or nothing at all; empty where that is not known. */
  readonly findingsEnd: string;
  /** Who held memory at the peak; null where that was not counted. */
  readonly holders: Holders | null;
}

/** Nanoseconds after the base. */
export interface TimeRange {
  readonly start: number;
  readonly end: number;
}

/** The range that holds all spans, marks and counters; never empty. */
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
  // Children start after their parent and before its end, and stand after it.
  for (let i = index + 1; i < spans.count && spans.start[i] <= spans.end[index]; i++) {
    if (spans.parent[i] === index) ns -= spans.end[i] - spans.start[i];
  }
  return ns;
}

/** The spans of each call that has a link, by link. */
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
