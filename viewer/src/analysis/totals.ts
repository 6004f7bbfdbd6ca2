/** Totals per module or class, by the rules of `modtrace summary` (`timeline/summary/totals.py`). */
import { compareValues } from "../format";
import { STEP_PROCESS } from "../trace/steps";
import {
  BACKWARD,
  FORWARD,
  hasDeviceTimes,
  isOnThread,
  RECOMPUTE,
  type Spans,
  type TimeRange,
  type Trace,
} from "../trace/trace";
import { type Device, forEachSpanInRange } from "./spans-in-range";

export type Grouping = "module" | "class";

export interface Group {
  /** The fqn or the class. */
  readonly title: string;
  /** A short name: the label of its spans. */
  readonly label: string;
  readonly moduleClass: string;
}

/** Groups of spans: by fqn or by class. */
export interface Groups {
  readonly by: Grouping;
  /** The group of each name. */
  readonly ofName: Int32Array;
  readonly groups: readonly Group[];
  /** For each name: its group, then the groups of the modules around it (by name), innermost first. */
  readonly paths: readonly (readonly number[])[];
  /** For each span: 1 if a span of the same group is around it and only spans of its phase are between them. */
  readonly nested: Uint8Array;
}

export interface Total extends Group {
  /** Index into `Groups.groups`. */
  readonly group: number;
  /** Forward calls that overlap the range. */
  calls: number;
  /**
   * Nanoseconds in the range, including inner spans of the same phase, without other phases; nested spans of a group
   * count once. A call inside backward counts for its own module and for the modules that contain it by name, wherever
   * it runs.
   */
  forward: number;
  backward: number;
  recompute: number;
  /** Total of the three phases; and its part outside inner spans. */
  total: number;
  self: number;
  /** Index of its first span in the range. */
  readonly first: number;
}

/** Assign each name to a group. */
export function groupsOf(trace: Trace, by: Grouping): Groups {
  const ids = new Map<string, number>();
  const groups: Group[] = [];
  const ofName = Int32Array.from(trace.names, ({ label, fqn, moduleClass }) => {
    const title = by === "class" ? moduleClass || label : fqn || label;
    let id = ids.get(title);
    if (id === undefined) {
      id = groups.length;
      ids.set(title, id);
      groups.push({ title, label: by === "class" ? title : label, moduleClass });
    }
    return id;
  });
  return { by, ofName, groups, paths: findPaths(trace, ofName), nested: findNested(trace, ofName) };
}

/**
 * Names used only by GPU tracks and by tracks without modules do not count as modules: a kernel has the name of the
 * module that launched it.
 */
function findPaths(trace: Trace, ofName: Int32Array): number[][] {
  const onThread = trace.tracks.map(isOnThread);
  const isCalled = new Uint8Array(trace.names.length);
  const isElsewhere = new Uint8Array(trace.names.length);
  trace.spans.name.forEach((name, i) => {
    (onThread[trace.spans.track[i]] ? isCalled : isElsewhere)[name] = 1;
  });
  const groupOf = new Map<string, number>();
  trace.names.forEach(({ fqn }, name) => {
    const isModule = isCalled[name] || !isElsewhere[name];
    if (isModule && !groupOf.has(fqn)) groupOf.set(fqn, ofName[name]);
  });
  return trace.names.map(({ fqn }, name) => {
    const path = [ofName[name]];
    for (let end = fqn.lastIndexOf("."); end > 0; end = fqn.lastIndexOf(".", end - 1)) {
      const group = groupOf.get(fqn.slice(0, end));
      if (group !== undefined) path.push(group);
    }
    return path;
  });
}

function findNested({ spans }: Trace, ofName: Int32Array): Uint8Array {
  const nested = new Uint8Array(spans.count);
  for (let i = 0; i < spans.count; i++) {
    const group = ofName[spans.name[i]];
    forEachOuterOfPhase(spans, spans.parent[i], spans.phase[i], (outer) => {
      if (ofName[spans.name[outer]] === group) nested[i] = 1;
    });
  }
  return nested;
}

/** Call `visit` with a span and the spans around it, from the inside out, as long as they have the given phase. */
export function forEachOuterOfPhase(spans: Spans, span: number, phase: number, visit: (outer: number) => void): void {
  for (let outer = span; outer >= 0 && spans.phase[outer] === phase; outer = spans.parent[outer]) visit(outer);
}

/**
 * Call `visit` with each span that a span of another phase interrupts: the spans around it that have its parent's
 * phase.
 */
export function forEachInterrupted(spans: Spans, span: number, visit: (outer: number) => void): void {
  const outer = spans.parent[span];
  if (outer < 0 || spans.phase[outer] === spans.phase[span]) return;
  forEachOuterOfPhase(spans, outer, spans.phase[outer], visit);
}

/** Whether a span is a call inside backward: a recompute, or a forward that repeats no earlier one. */
export function isCallInBackward({ spans, tracks }: Trace, span: number): boolean {
  const phase = spans.phase[span];
  return phase === RECOMPUTE || (phase === FORWARD && tracks[spans.track[span]].kind === "backward");
}

const PHASE_FIELD = { [FORWARD]: "forward", [BACKWARD]: "backward", [RECOMPUTE]: "recompute" } as const;

/**
 * Total time of all processes: for the first, the time of its steps; for each other one, from its first start to its
 * last end. 0 without steps.
 */
export function timeOfSteps({ spans, tracks, processes }: Trace, steps: readonly TimeRange[]): number {
  if (!steps.length) return 0;
  const first = new Float64Array(processes.length).fill(Infinity);
  const last = new Float64Array(processes.length).fill(-Infinity);
  for (let i = 0; i < spans.count; i++) {
    const { process } = tracks[spans.track[i]];
    first[process] = Math.min(first[process], spans.start[i]);
    last[process] = Math.max(last[process], spans.end[i]);
  }
  const others = last.reduce((sum, end, i) => (i === STEP_PROCESS || end < first[i] ? sum : sum + end - first[i]), 0);
  return steps.reduce((sum, { start, end }) => sum + end - start, others);
}

/** One row per group that has a span on the device in the range; spans are cut at the range's ends. */
export function computeTotals(trace: Trace, groups: Groups, device: Device, range: TimeRange | null): Total[] {
  const { spans } = trace;
  // If events of the device mark the start and end of calls, a recompute has its own device time, as other phases do.
  const isRerunTimed = device === "gpu" && hasDeviceTimes(trace);
  const countsByName = (span: number) => !isRerunTimed && isCallInBackward(trace, span);
  const rows = new Map<number, Total>();
  /** Self times of calls inside backward, by phase and name. */
  const inside = { forward: new Map<number, number>(), recompute: new Map<number, number>() };
  const countInside = (span: number, ns: number) => {
    if (!countsByName(span)) return;
    const ofPhase = inside[spans.phase[span] === RECOMPUTE ? "recompute" : "forward"];
    ofPhase.set(spans.name[span], (ofPhase.get(spans.name[span]) ?? 0) + ns);
  };
  const countTimed = (span: number, ns: number) => {
    if (countsByName(span) || groups.nested[span]) return;
    const row = rows.get(groups.ofName[spans.name[span]]);
    if (row) row[PHASE_FIELD[spans.phase[span] as 0 | 1 | 2]] += ns;
  };
  forEachSpanInRange(trace, device, range, (i, ns) => {
    const group = groups.ofName[spans.name[i]];
    let row = rows.get(group);
    if (!row) {
      const zeros = { calls: 0, forward: 0, backward: 0, recompute: 0, total: 0, self: 0 };
      row = { group, ...groups.groups[group], ...zeros, first: i };
      rows.set(group, row);
    }
    if (spans.phase[i] === FORWARD) row.calls++;
    row.self += ns;
    countTimed(i, ns);
    forEachInterrupted(spans, i, (interrupted) => countTimed(interrupted, -ns));
    countInside(i, ns);
    const parentSpan = spans.parent[i];
    if (parentSpan < 0) return;
    countInside(parentSpan, -ns);
    const outer = rows.get(groups.ofName[spans.name[parentSpan]]);
    if (outer) outer.self -= ns;
  });
  for (const phase of ["forward", "recompute"] as const) {
    for (const [name, ns] of inside[phase]) {
      // Work on a GPU counts only for the module that launched it, not for modules that contain it by name.
      const path = device === "gpu" ? [groups.ofName[name]] : groups.paths[name];
      for (const group of new Set(path)) {
        const row = rows.get(group);
        if (row) row[phase] += ns;
      }
    }
  }
  for (const row of rows.values()) row.total = row.forward + row.backward + row.recompute;
  return [...rows.values()];
}

export type SortKey = "title" | "moduleClass" | "calls" | "forward" | "backward" | "recompute" | "total" | "self";

/** Rows sorted by one field, then by title. */
export function sortTotals<Row extends Total & Readonly<Record<Key, string | number>>, Key extends string = SortKey>(
  rows: readonly Row[],
  key: Key,
  descending: boolean,
): Row[] {
  const sign = descending ? -1 : 1;
  return [...rows].sort((a, b) => sign * compareValues(a[key], b[key]) || compareValues(a.title, b.title));
}
