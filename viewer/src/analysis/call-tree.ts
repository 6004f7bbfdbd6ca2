/** Calls merged by path: the tree that the aggregated flame graph shows. */

import type { TimeRange, Trace } from "../trace/trace";
import { type Device, type Group, type Groups, tracksOf } from "./totals";

export interface CallTreeNode extends Group {
  readonly parent: CallTreeNode | null;
  readonly depth: number;
  readonly children: CallTreeNode[];
  /** Nanoseconds in the range, with and without what its children take. */
  total: number;
  self: number;
  spans: number;
}

/** Merge the calls in the range by path, under one node per kind of track; the root's title is "all". */
export function buildCallTree(trace: Trace, groups: Groups, device: Device, range: TimeRange | null): CallTreeNode {
  const { spans } = trace;
  const onDevice = tracksOf(trace, device);
  const [from, to] = range ? [range.start, range.end] : [-Infinity, Infinity];
  const addNode = (outer: CallTreeNode | null, group: Group): CallTreeNode => {
    const depth = outer ? outer.depth + 1 : 0;
    const node = { ...group, parent: outer, depth, children: [], total: 0, self: 0, spans: 0 };
    outer?.children.push(node);
    return node;
  };
  const root = addNode(null, { title: "all", label: "all", moduleClass: "" });
  const kindNodes = new Map<string, CallTreeNode>();
  const childrenByGroup = new Map<CallTreeNode, Map<number, CallTreeNode>>();
  const nodeOfSpan: (CallTreeNode | undefined)[] = new Array(spans.count);
  for (let i = 0; i < spans.count && spans.start[i] < to; i++) {
    if (!onDevice[spans.track[i]] || spans.end[i] < from) continue;
    const ns = Math.min(spans.end[i], to) - Math.max(spans.start[i], from);
    let outer = spans.parent[i] >= 0 ? nodeOfSpan[spans.parent[i]] : undefined;
    if (outer) {
      outer.self -= ns;
    } else {
      const { kind } = trace.tracks[spans.track[i]];
      outer = kindNodes.get(kind) ?? addNode(root, { title: kind, label: kind, moduleClass: "" });
      kindNodes.set(kind, outer);
      outer.total += ns;
      root.total += ns;
    }
    const group = groups.ofName[spans.name[i]];
    let siblings = childrenByGroup.get(outer);
    if (!siblings) {
      siblings = new Map();
      childrenByGroup.set(outer, siblings);
    }
    let node = siblings.get(group);
    if (!node) {
      node = addNode(outer, groups.groups[group]);
      siblings.set(group, node);
    }
    node.spans++;
    node.total += ns;
    node.self += ns;
    nodeOfSpan[i] = node;
  }
  return root;
}

/** The node that holds all others of its tree. */
export function rootOf(node: CallTreeNode): CallTreeNode {
  let root = node;
  while (root.parent) root = root.parent;
  return root;
}
