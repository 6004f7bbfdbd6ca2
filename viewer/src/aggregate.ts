/** Totals per module or class, and the tree that the aggregated flame graph shows. */
import { BACKWARD, FORWARD, RECOMPUTE, type Trace, type Window } from "./trace";

export type Grouping = "module" | "class";
export type Device = "cpu" | "gpu";

export interface Group {
  /** The fqn, or the class. */
  readonly title: string;
  /** What a slice of it says; short. */
  readonly label: string;
  readonly moduleClass: string;
}

/** Groups of spans: by fqn or by class. */
export interface Groups {
  readonly by: Grouping;
  /** The group of each name. */
  readonly ofName: Int32Array;
  readonly names: readonly Group[];
  /** Per span: bit 0 where a span around it is of the same group, bit 1 where one is of the same group and phase. */
  readonly inside: Uint8Array;
}

export interface Total extends Group {
  readonly group: number;
  /** Slices that lie in the range, whole or in part. */
  slices: number;
  /** Nanoseconds in the range, per phase. */
  forward: number;
  backward: number;
  recompute: number;
  /** Nanoseconds in the range, with and without what runs inside it; nested slices of a group count once. */
  total: number;
  self: number;
  /** The first slice of it in the range. */
  readonly first: number;
}

export function groupsOf(trace: Trace, by: Grouping): Groups {
  const ids = new Map<string, number>();
  const names: Group[] = [];
  const ofName = Int32Array.from(trace.names, ({ label, fqn, moduleClass }) => {
    const title = by === "class" ? moduleClass || label : fqn || label;
    let id = ids.get(title);
    if (id === undefined) {
      id = names.length;
      ids.set(title, id);
      names.push({ title, label: by === "class" ? title : label, moduleClass });
    }
    return id;
  });
  return { by, ofName, names, inside: insideOf(trace, ofName) };
}

function insideOf({ spans }: Trace, ofName: Int32Array): Uint8Array {
  const inside = new Uint8Array(spans.count);
  for (let i = 0; i < spans.count; i++) {
    const group = ofName[spans.name[i]];
    for (let around = spans.parent[i]; around >= 0 && inside[i] < 3; around = spans.parent[around]) {
      if (ofName[spans.name[around]] !== group) continue;
      inside[i] |= spans.phase[around] === spans.phase[i] ? 3 : 1;
    }
  }
  return inside;
}

/** Per track, whether it runs on the device. */
const tracksOf = (trace: Trace, device: Device): boolean[] =>
  trace.tracks.map(({ kind }) => (kind === "gpu") === (device === "gpu"));

const PHASE_FIELD = { [FORWARD]: "forward", [BACKWARD]: "backward", [RECOMPUTE]: "recompute" } as const;

/** One row per group with a slice in the range, on the device; the slices are cut at the range's ends. */
export function totals(trace: Trace, groups: Groups, device: Device, range: Window | null): Total[] {
  const { spans } = trace;
  const on = tracksOf(trace, device);
  const rows = new Map<number, Total>();
  const [from, to] = range ? [range.start, range.end] : [-Infinity, Infinity];
  for (let i = 0; i < spans.count && spans.start[i] < to; i++) {
    if (!on[spans.track[i]] || spans.end[i] < from) continue;
    const time = Math.min(spans.end[i], to) - Math.max(spans.start[i], from);
    const group = groups.ofName[spans.name[i]];
    let row = rows.get(group);
    if (!row) {
      const times = { slices: 0, forward: 0, backward: 0, recompute: 0, total: 0, self: 0 };
      row = { group, ...groups.names[group], ...times, first: i };
      rows.set(group, row);
    }
    row.slices++;
    row.self += time;
    if (!(groups.inside[i] & 1)) row.total += time;
    if (!(groups.inside[i] & 2)) row[PHASE_FIELD[spans.phase[i] as 0 | 1 | 2]] += time;
    const parent = spans.parent[i];
    const around = parent >= 0 ? rows.get(groups.ofName[spans.name[parent]]) : undefined;
    if (around) around.self -= time;
  }
  return [...rows.values()];
}

export interface Node extends Group {
  readonly parent: Node | null;
  readonly depth: number;
  readonly children: Node[];
  total: number;
  self: number;
  slices: number;
}

/** The calls of the range merged by path, under one node per kind of track. */
export function tree(trace: Trace, groups: Groups, device: Device, range: Window | null): Node {
  const { spans } = trace;
  const on = tracksOf(trace, device);
  const [from, to] = range ? [range.start, range.end] : [-Infinity, Infinity];
  const child = (parent: Node | null, group: Group): Node => {
    const depth = parent ? parent.depth + 1 : 0;
    const node = { ...group, parent, depth, children: [], total: 0, self: 0, slices: 0 };
    parent?.children.push(node);
    return node;
  };
  const root = child(null, { title: "all", label: "all", moduleClass: "" });
  const kinds = new Map<string, Node>();
  const ids = new Map<Node, Map<number, Node>>();
  const nodes: (Node | undefined)[] = new Array(spans.count);
  for (let i = 0; i < spans.count && spans.start[i] < to; i++) {
    if (!on[spans.track[i]] || spans.end[i] < from) continue;
    const time = Math.min(spans.end[i], to) - Math.max(spans.start[i], from);
    let parent = spans.parent[i] >= 0 ? nodes[spans.parent[i]] : undefined;
    if (!parent) {
      const { kind } = trace.tracks[spans.track[i]];
      parent = kinds.get(kind) ?? child(root, { title: kind, label: kind, moduleClass: "" });
      kinds.set(kind, parent);
      parent.total += time;
      root.total += time;
    } else {
      parent.self -= time;
    }
    const group = groups.ofName[spans.name[i]];
    let siblings = ids.get(parent);
    if (!siblings) ids.set(parent, (siblings = new Map()));
    let node = siblings.get(group);
    if (!node) siblings.set(group, (node = child(parent, groups.names[group])));
    node.slices++;
    node.total += time;
    node.self += time;
    nodes[i] = node;
  }
  return root;
}

export type SortKey = "title" | "moduleClass" | "slices" | "forward" | "backward" | "recompute" | "total" | "self";

/** Rows in the order of one field; equal ones by title. */
export function sorted(rows: readonly Total[], key: SortKey, descending: boolean): Total[] {
  const sign = descending ? -1 : 1;
  const order = (a: string | number, b: string | number) => (a < b ? -1 : a > b ? 1 : 0);
  return [...rows].sort((a, b) => sign * order(a[key], b[key]) || order(a.title, b.title));
}
