/** Callers and callees of a module or class: the two halves of the sandwich view. */
import type { TimeRange, Trace } from "../trace/trace";
import { type CallTreeNode, MergedTree } from "./merged-tree";
import { type Device, forEachSpanInRange } from "./spans-in-range";
import { forEachOuterOfPhase, type Groups, isCallInBackward } from "./totals";

export interface Sandwich {
  /** The group, with its callers as children, their callers below them, and so on. */
  readonly callers: CallTreeNode;
  /** The group, with its callees as children. */
  readonly callees: CallTreeNode;
}

/** The nodes to which the self time of a span is added. */
interface Place {
  readonly caller: CallTreeNode;
  readonly callee: CallTreeNode;
}

/**
 * Merge the calls of a group on the device in the range, cut at its ends, so that their sum equals its row of totals. A
 * call inside another call of the same group is part of that call. In `callers`, the time of a node is the time of the
 * group when called by that path. The callers of a span are the spans around it, as long as these have its phase. The
 * callers of a call inside backward on the CPU are the modules that contain it by name, not the backward in which it
 * runs.
 */
export function buildSandwich(
  trace: Trace,
  groups: Groups,
  group: number,
  device: Device,
  range: TimeRange | null,
): Sandwich {
  const { spans } = trace;
  const tree = new MergedTree(groups.groups);
  const callers = tree.root(groups.groups[group]);
  const callees = tree.root(groups.groups[group]);
  const placeOfSpan = new Map<number, Place>();
  const pathOf = (span: number): readonly number[] => {
    if (device === "cpu" && isCallInBackward(trace, span)) return groups.paths[spans.name[span]];
    const path: number[] = [];
    forEachOuterOfPhase(spans, span, spans.phase[span], (outer) => path.push(groups.ofName[spans.name[outer]]));
    return path;
  };
  /** The nodes for the self time of a span; undefined if the span is not in the group. */
  const placeOf = (span: number): Place | undefined => {
    const path = pathOf(span);
    const position = path.lastIndexOf(group);
    if (position < 0) return undefined;
    const descend = (root: CallTreeNode, way: readonly number[]) =>
      way.reduce((node, next) => tree.child(node, next), root);
    return {
      caller: descend(callers, path.slice(position + 1)),
      callee: descend(callees, path.slice(0, position).reverse()),
    };
  };
  forEachSpanInRange(trace, device, range, (span, ns) => {
    const outer = placeOfSpan.get(spans.parent[span]);
    if (outer) countSelf(outer, -ns);
    const place = placeOf(span);
    if (!place) return;
    placeOfSpan.set(span, place);
    countSelf(place, ns);
    if (place.callee !== callees) place.callee.spans++;
    else if (!groups.nested[span]) {
      callees.spans++;
      for (let node: CallTreeNode | null = place.caller; node; node = node.parent) node.spans++;
    }
  });
  return { callers, callees };
}

/** Add self time of a span to its nodes and to all their ancestors. */
function countSelf({ caller, callee }: Place, ns: number): void {
  for (const leaf of [caller, callee]) {
    leaf.self += ns;
    for (let node: CallTreeNode | null = leaf; node; node = node.parent) node.total += ns;
  }
}
