/** Calls merged by path: the tree that the aggregated flame graph shows. */
import type { TimeRange, Trace } from "../trace/trace";
import { type CallTreeNode, countSpan, MergedTree } from "./merged-tree";
import { type Device, forEachSpanInRange } from "./spans-in-range";
import type { Groups } from "./totals";

/** Merge the calls in the range by path, under one node per kind of track; the root's title is "all". */
export function buildCallTree(trace: Trace, groups: Groups, device: Device, range: TimeRange | null): CallTreeNode {
  const { spans } = trace;
  const tree = new MergedTree(groups.groups);
  const root = tree.root({ title: "all", label: "all", moduleClass: "" });
  const kindNodes = new Map<string, CallTreeNode>();
  const nodeOfKind = (kind: string) => {
    const node = kindNodes.get(kind) ?? tree.append(root, { title: kind, label: kind, moduleClass: "" });
    kindNodes.set(kind, node);
    return node;
  };
  const nodeOfSpan: (CallTreeNode | undefined)[] = new Array(spans.count);
  forEachSpanInRange(trace, device, range, (span, ns) => {
    let outer = spans.parent[span] >= 0 ? nodeOfSpan[spans.parent[span]] : undefined;
    if (outer) {
      outer.self -= ns;
    } else {
      outer = nodeOfKind(trace.tracks[spans.track[span]].kind);
      outer.total += ns;
      root.total += ns;
    }
    const node = tree.child(outer, groups.ofName[spans.name[span]]);
    countSpan(node, ns);
    nodeOfSpan[span] = node;
  });
  return root;
}
