/** Two steps of a recording as a new trace: each step is a group of processes, and both start at time 0. */
import { formatDuration } from "../format";
import { durationOf } from "../layout/viewport";
import type { Change, Comparison, Verdict } from "../trace/comparison";
import { lowerBound } from "../trace/depth-levels";
import { STEP_PARTS, stepTimesOf } from "../trace/step-times";
import { STEP_PROCESS, type Step } from "../trace/steps";
import type { CounterSeries, Mark, Spans, Trace } from "../trace/trace";
import { describePhase } from "./describe";

/** A difference below this share of the module's time, or of the step's, is ignored. */
const MIN_CHANGE = 0.05;
const MIN_STEP_SHARE = 0.001;

type Side = 0 | 1;
const SIDES: readonly Side[] = [0, 1];

/** A span of the new trace: its index in the recording and its side. */
interface Origin {
  readonly span: number;
  readonly side: Side;
}

/**
 * The spans of the steps' process that start in either step, ordered by their time since the start of the step; a
 * parent stays before its children.
 */
function mergeByStart({ spans, tracks }: Trace, steps: readonly [Step, Step]): Origin[] {
  const next = steps.map((step) => lowerBound(spans.start, step.start));
  const ends = steps.map((step) => lowerBound(spans.start, step.end));
  const startOf = (side: Side) =>
    next[side] < ends[side] ? spans.start[next[side]] - steps[side].start : Number.POSITIVE_INFINITY;
  const merged: Origin[] = [];
  while (next[0] < ends[0] || next[1] < ends[1]) {
    const side: Side = startOf(0) <= startOf(1) ? 0 : 1;
    const span = next[side]++;
    if (tracks[spans.track[span]].process === STEP_PROCESS) merged.push({ span, side });
  }
  return merged;
}

function spansOf(trace: Trace, steps: readonly [Step, Step], origins: readonly Origin[], trackOf: Int32Array): Spans {
  const { spans } = trace;
  const position = SIDES.map(() => new Map<number, number>());
  origins.forEach(({ span, side }, i) => {
    position[side].set(span, i);
  });
  const outers = Int32Array.from(origins, ({ span, side }) => position[side].get(spans.parent[span]) ?? -1);
  const depth = new Int32Array(origins.length);
  outers.forEach((outer, i) => {
    depth[i] = outer < 0 ? 0 : depth[outer] + 1;
  });
  const column = (values: ArrayLike<number>) => Float64Array.from(origins, ({ span }) => values[span]);
  return {
    count: origins.length,
    start: Float64Array.from(origins, ({ span, side }) => spans.start[span] - steps[side].start),
    end: Float64Array.from(origins, ({ span, side }) => spans.end[span] - steps[side].start),
    name: column(spans.name),
    phase: column(spans.phase),
    track: Float64Array.from(origins, ({ span, side }) => trackOf[2 * spans.track[span] + side]),
    depth,
    parent: outers,
    call: column(spans.call),
    step: column(spans.step),
    // Calls of different sides are never joined.
    link: Float64Array.from(origins, ({ span, side }) => (spans.link[span] < 0 ? -1 : 2 * spans.link[span] + side)),
    complete: column(spans.complete),
  };
}

function samplesIn(counter: CounterSeries, step: Step, process: number): CounterSeries {
  const [first, end] = [lowerBound(counter.time, step.start), lowerBound(counter.time, step.end)];
  // The last sample before the step is still valid at its start.
  const from = first > 0 && counter.time[first] !== step.start ? first - 1 : first;
  return {
    ...counter,
    process,
    time: counter.time.slice(from, end).map((time) => Math.max(time - step.start, 0)),
    value: counter.value.slice(from, end),
  };
}

function verdictOf(before: number, after: number, calls: readonly [number, number], stepNs: number): Verdict {
  if (!calls[0]) return "added";
  if (!calls[1]) return "removed";
  const difference = after - before;
  if (Math.abs(difference) <= Math.max(MIN_CHANGE * before, MIN_STEP_SHARE * stepNs)) return "same";
  return difference > 0 ? "longer" : "shorter";
}

/**
 * Self times per module and phase, separate for threads and GPUs. Spans of whole backward passes belong to no module:
 * -1.
 */
function changesOf(trace: Trace, origins: readonly Origin[], spans: Spans, stepNs: number) {
  const keys = new Map<string, number>();
  const titles: { fqn: string; phase: string }[] = [];
  const times: [number, number][] = [];
  const calls: [number, number][] = [];
  const keyOf = Int32Array.from(origins, ({ span }) => {
    const { fqn, label } = trace.names[trace.spans.name[span]];
    const phase = describePhase(trace, span);
    if (phase === "backward pass") return -1;
    const key = `${phase}\n${fqn || label}`;
    let index = keys.get(key);
    if (index === undefined) {
      index = titles.length;
      keys.set(key, index);
      titles.push({ fqn: fqn || label, phase });
      times.push([0, 0]);
      calls.push([0, 0]);
    }
    return index;
  });
  origins.forEach(({ side }, i) => {
    if (keyOf[i] < 0) return;
    const ns = spans.end[i] - spans.start[i];
    times[keyOf[i]][side] += ns;
    calls[keyOf[i]][side]++;
    if (spans.parent[i] >= 0) times[keyOf[spans.parent[i]]][side] -= ns;
  });
  const changes = titles.map(({ fqn, phase }, i): Change => {
    const [[before, after], [callsBefore, callsAfter]] = [times[i], calls[i]];
    const verdict = verdictOf(before, after, calls[i], stepNs);
    const difference = after - before;
    return { fqn, phase, before, after, difference, interval: null, callsBefore, callsAfter, verdict };
  });
  const isSame = (i: number) => (changes[i].verdict === "same" ? 1 : 0);
  const cost = (i: number) => Math.abs(changes[i].difference);
  const order = [...changes.keys()].sort((a, b) => isSame(a) - isSame(b) || cost(b) - cost(a) || a - b);
  const rank = new Int32Array(order.length);
  order.forEach((i, position) => {
    rank[i] = position;
  });
  return { changes: order.map((i) => changes[i]), ofSpan: keyOf.map((key) => rank[key] ?? -1) };
}

/** The location of the difference: a phase of modules, or outside modules. */
function partsNote(trace: Trace, [first, second]: readonly [Step, Step]): string {
  const [before, after] = [first, second].map((step) => stepTimesOf(trace, [step])[0]);
  const parts = STEP_PARTS.filter((part) => before[part] || after[part]);
  const sizes = parts.map((part) => `${part} ${formatDuration(before[part])} → ${formatDuration(after[part])}`);
  return (
    `Of that ${sizes.join(", ")}. Before, between and after are outside all modules: before the first span, between ` +
    "spans (the loss), and behind the last (the optimizer)."
  );
}

function notesOf(trace: Trace, [first, second]: readonly [Step, Step]): string[] {
  const [before, after] = [durationOf(first), durationOf(second)];
  const percent = ((after - before) / before) * 100;
  const size = `${formatDuration(Math.abs(after - before))} (${Math.abs(percent).toFixed(1)} %)`;
  const outcome = after === before ? "just as long" : `${size} ${after < before ? "less" : "more"}`;
  return [
    `${first.name} took ${formatDuration(before)}, ${second.name} ${formatDuration(after)}: ${outcome}.`,
    partsNote(trace, [first, second]),
    "Self times of one step each: what of a difference is chance, two steps cannot say. “Same” is less than " +
      `${100 * MIN_CHANGE} % of the module's time, or ${100 * MIN_STEP_SHARE} % of the step's.`,
  ];
}

/** The trace of two steps; its comparison contains the changes from the first to the second. */
export function compareSteps(trace: Trace, steps: readonly [Step, Step]): Trace {
  const origins = mergeByStart(trace, steps);
  const used = new Set(origins.map(({ span }) => trace.spans.track[span]));
  const trackOf = new Int32Array(2 * trace.tracks.length);
  const tracks = [...used]
    .sort((a, b) => a - b)
    .flatMap((track, i) =>
      SIDES.map((side) => {
        trackOf[2 * track + side] = 2 * i + side;
        return { ...trace.tracks[track], process: side };
      }),
    );
  const spans = spansOf(trace, steps, origins, trackOf);
  const comparison: Comparison = {
    titles: [steps[0].name, steps[1].name],
    notes: notesOf(trace, steps),
    ...changesOf(trace, origins, spans, durationOf(steps[0])),
  };
  const marks = SIDES.map(
    (side): Mark => ({ time: durationOf(steps[side]), kind: "mark", text: `end of ${steps[side].name}` }),
  );
  return {
    ...trace,
    base: 0n,
    spans,
    tracks,
    processes: SIDES.map((side) => {
      const process = trace.processes[STEP_PROCESS];
      return { ...process, name: `${steps[side].name} · ${process.name}` };
    }),
    marks: marks.sort((a, b) => a.time - b.time),
    counters: trace.counters
      .filter(({ process }) => process === STEP_PROCESS)
      .flatMap((counter) => SIDES.map((side) => samplesIn(counter, steps[side], side))),
    spanArgs: Object.fromEntries(
      origins.flatMap(({ span }, i) => (trace.spanArgs[span] ? [[i, trace.spanArgs[span]]] : [])),
    ),
    comparison,
    stepParts: null,
    findings: [],
    findingsEnd: "",
    holders: null,
  };
}
