/** A timeline in memory: columns of spans as typed arrays, and what they point into. */

export const FORWARD = 0;
export const BACKWARD = 1;
export const RECOMPUTE = 2;
export const PHASES = ["forward", "backward", "recompute"] as const;

export type Integers = Int32Array | Uint8Array | Float64Array;

/** One entry per span, in start order, a parent before its children. Times are ns after `Trace.base`. */
export interface Spans {
  readonly count: number;
  readonly start: Float64Array;
  readonly end: Float64Array;
  readonly name: Integers;
  readonly phase: Integers;
  readonly track: Integers;
  readonly depth: Integers;
  readonly parent: Integers;
  readonly call: Integers;
  readonly step: Integers;
  readonly link: Integers;
  readonly complete: Integers;
}

export interface Name {
  readonly label: string;
  readonly fqn: string;
  readonly moduleClass: string;
}

export interface Process {
  readonly pid: number;
  readonly rank: number | null;
  readonly name: string;
}

export interface Track {
  readonly kind: string;
  readonly thread: string;
  readonly tid: number;
  readonly process: number;
  readonly name: string;
}

export interface Mark {
  readonly time: number;
  readonly kind: string;
  readonly text: string;
}

export interface CounterSeries {
  readonly name: string;
  readonly unit: string;
  readonly process: number;
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
  readonly spanArgs: Readonly<Record<string, Readonly<Record<string, string>>>>;
}

/** A stretch of time in ns after the base. */
export interface Window {
  readonly start: number;
  readonly end: number;
}

/** All that the trace holds, never empty. */
export function extent(trace: Trace): Window {
  let start = Infinity;
  let end = -Infinity;
  const take = (time: number) => {
    if (time < start) start = time;
    if (time > end) end = time;
  };
  for (let i = 0; i < trace.spans.count; i++) {
    take(trace.spans.start[i]);
    take(trace.spans.end[i]);
  }
  for (const mark of trace.marks) take(mark.time);
  for (const { time } of trace.counters) {
    if (time.length) {
      take(time[0]);
      take(time[time.length - 1]);
    }
  }
  if (start > end) return { start: 0, end: 1000 };
  return { start, end: Math.max(end, start + 1) };
}

/** Time of each span that no child on its track covers, in ns. */
export function selfTime(spans: Spans, index: number): number {
  let self = spans.end[index] - spans.start[index];
  // Children start after their parent and before its end, and stand after it.
  for (let i = index + 1; i < spans.count && spans.start[i] <= spans.end[index]; i++) {
    if (spans.parent[i] === index) self -= spans.end[i] - spans.start[i];
  }
  return self;
}

/** The spans of each link, by link; spans without another half are left out. */
export function linked(spans: Spans): Map<number, number[]> {
  const halves = new Map<number, number[]>();
  for (let i = 0; i < spans.count; i++) {
    const link = spans.link[i];
    if (link < 0) continue;
    const others = halves.get(link);
    if (others) others.push(i);
    else halves.set(link, [i]);
  }
  return halves;
}
