/** Totals per module or class. */
import { BACKWARD, FORWARD, RECOMPUTE, type TimeRange, type Trace } from "../trace/trace";

export type Grouping = "module" | "class";
export type Device = "cpu" | "gpu";

export interface Group {
  /** The fqn, or the class. */
  readonly title: string;
  /** Short: what a span of it is labelled. */
  readonly label: string;
  readonly moduleClass: string;
}

/** Groups of spans: by fqn or by class. */
export interface Groups {
  readonly by: Grouping;
  /** The group of each name. */
  readonly ofName: Int32Array;
  readonly groups: readonly Group[];
  /** Per span: bit 0 where a span around it is of the same group, bit 1 where one is of the same group and phase. */
  readonly nested: Uint8Array;
}

export interface Total extends Group {
  /** Index into `Groups.groups`. */
  readonly group: number;
  /** Spans that lie in the range, whole or in part. */
  spans: number;
  /** Nanoseconds in the range, per phase. */
  forward: number;
  backward: number;
  recompute: number;
  /** Nanoseconds in the range, with and without what runs inside; nested spans of a group count once. */
  total: number;
  self: number;
  /** The first span of it in the range. */
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
  return { by, ofName, groups, nested: findNested(trace, ofName) };
}

function findNested({ spans }: Trace, ofName: Int32Array): Uint8Array {
  const nested = new Uint8Array(spans.count);
  for (let i = 0; i < spans.count; i++) {
    const group = ofName[spans.name[i]];
    for (let outer = spans.parent[i]; outer >= 0 && nested[i] < 3; outer = spans.parent[outer]) {
      if (ofName[spans.name[outer]] !== group) continue;
      nested[i] |= spans.phase[outer] === spans.phase[i] ? 3 : 1;
    }
  }
  return nested;
}

/** Per track, whether it holds modules on the CPU or on the GPU, whichever `device` says; collectives are no modules. */
export const tracksOf = (trace: Trace, device: Device): boolean[] =>
  trace.tracks.map(({ kind }) => kind !== "communication" && (kind === "gpu") === (device === "gpu"));

const PHASE_FIELD = { [FORWARD]: "forward", [BACKWARD]: "backward", [RECOMPUTE]: "recompute" } as const;

/** One row per group that has a span on the device in the range; spans are cut at the range's ends. */
export function computeTotals(trace: Trace, groups: Groups, device: Device, range: TimeRange | null): Total[] {
  const { spans } = trace;
  const onDevice = tracksOf(trace, device);
  const rows = new Map<number, Total>();
  const [from, to] = range ? [range.start, range.end] : [-Infinity, Infinity];
  for (let i = 0; i < spans.count && spans.start[i] < to; i++) {
    if (!onDevice[spans.track[i]] || spans.end[i] < from) continue;
    const ns = Math.min(spans.end[i], to) - Math.max(spans.start[i], from);
    const group = groups.ofName[spans.name[i]];
    let row = rows.get(group);
    if (!row) {
      const zeros = { spans: 0, forward: 0, backward: 0, recompute: 0, total: 0, self: 0 };
      row = { group, ...groups.groups[group], ...zeros, first: i };
      rows.set(group, row);
    }
    row.spans++;
    row.self += ns;
    if (!(groups.nested[i] & 1)) row.total += ns;
    if (!(groups.nested[i] & 2)) row[PHASE_FIELD[spans.phase[i] as 0 | 1 | 2]] += ns;
    const parentSpan = spans.parent[i];
    const outer = parentSpan >= 0 ? rows.get(groups.ofName[spans.name[parentSpan]]) : undefined;
    if (outer) outer.self -= ns;
  }
  return [...rows.values()];
}

export type SortKey = "title" | "moduleClass" | "spans" | "forward" | "backward" | "recompute" | "total" | "self";

/** Rows in the order of one field; equal ones by title. */
export function sortTotals(rows: readonly Total[], key: SortKey, descending: boolean): Total[] {
  const sign = descending ? -1 : 1;
  const order = (a: string | number, b: string | number) => (a < b ? -1 : a > b ? 1 : 0);
  return [...rows].sort((a, b) => sign * order(a[key], b[key]) || order(a.title, b.title));
}
