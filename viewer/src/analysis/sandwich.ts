/** What calls a module or class, and what it calls: the two halves of the sandwich view. */
import type { TimeRange, Trace } from "../trace/trace";
import type { CallTreeNode } from "./call-tree";
import { type Device, type Group, type Groups, tracksOf } from "./totals";

export interface Sandwich {
  /** The group, with its callers as children, their callers below them, and so on. */
  readonly callers: CallTreeNode;
  /** The group, with what it calls below it. */
  readonly callees: CallTreeNode;
}

/** A tree whose nodes have at most one child per group. */
class MergedTree {
  private readonly children = new Map<CallTreeNode, Map<number, CallTreeNode>>();

  constructor(private readonly groups: readonly Group[]) {}

  newNode(group: number, outer: CallTreeNode | null): CallTreeNode {
    const depth = outer ? outer.depth + 1 : 0;
    return { ...this.groups[group], parent: outer, depth, children: [], total: 0, self: 0, spans: 0 };
  }

  child(outer: CallTreeNode, group: number): CallTreeNode {
    let siblings = this.children.get(outer);
    if (!siblings) {
      siblings = new Map();
      this.children.set(outer, siblings);
    }
    let node = siblings.get(group);
    if (!node) {
      node = this.newNode(group, outer);
      siblings.set(group, node);
      outer.children.push(node);
    }
    return node;
  }
}

/**
 * Merge the calls of a group on the device in the range, cut at its ends. A call inside another of the same group belongs
 * to that one. In `callers`, a node's time is what the group takes when called that way.
 */
export function buildSandwich(
  trace: Trace,
  groups: Groups,
  group: number,
  device: Device,
  range: TimeRange | null,
): Sandwich {
  const { spans } = trace;
  const onDevice = tracksOf(trace, device);
  const [from, to] = range ? [range.start, range.end] : [-Infinity, Infinity];
  const tree = new MergedTree(groups.groups);
  const callers = tree.newNode(group, null);
  const callees = tree.newNode(group, null);
  const groupOf = (span: number) => groups.ofName[spans.name[span]];
  const add = (node: CallTreeNode, ns: number) => {
    node.spans++;
    node.total += ns;
    node.self += ns;
  };
  const nodeOfSpan = new Map<number, CallTreeNode>();
  for (let i = 0; i < spans.count && spans.start[i] < to; i++) {
    if (!onDevice[spans.track[i]] || spans.end[i] < from) continue;
    const ns = Math.min(spans.end[i], to) - Math.max(spans.start[i], from);
    const outerNode = nodeOfSpan.get(spans.parent[i]);
    if (outerNode) {
      const node = tree.child(outerNode, groupOf(i));
      outerNode.self -= ns;
      add(node, ns);
      nodeOfSpan.set(i, node);
    } else if (groupOf(i) === group) {
      nodeOfSpan.set(i, callees);
      add(callees, ns);
      add(callers, ns);
      let node = callers;
      for (let outer = spans.parent[i]; outer >= 0; outer = spans.parent[outer]) {
        node.self -= ns;
        node = tree.child(node, groupOf(outer));
        add(node, ns);
      }
    }
  }
  return { callers, callees };
}
