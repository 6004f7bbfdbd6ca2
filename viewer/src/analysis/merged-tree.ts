/** A tree of calls merged by path: its nodes have at most one child per group. */
import type { Group } from "./totals";

export interface CallTreeNode extends Group {
  readonly parent: CallTreeNode | null;
  readonly depth: number;
  readonly children: CallTreeNode[];
  /** Nanoseconds in the range, with and without the time of the children. */
  total: number;
  self: number;
  spans: number;
}

export class MergedTree {
  private readonly byGroup = new Map<CallTreeNode, Map<number, CallTreeNode>>();

  constructor(private readonly groups: readonly Group[]) {}

  /** Add a root and return it. */
  root(group: Group): CallTreeNode {
    return { ...group, parent: null, depth: 0, children: [], total: 0, self: 0, spans: 0 };
  }

  /** Add a child to a node and return it. */
  append(outer: CallTreeNode, group: Group): CallTreeNode {
    const node = { ...this.root(group), parent: outer, depth: outer.depth + 1 };
    outer.children.push(node);
    return node;
  }

  /** The child of a node for a group; it is added if there is none. */
  child(outer: CallTreeNode, group: number): CallTreeNode {
    let siblings = this.byGroup.get(outer);
    if (!siblings) {
      siblings = new Map();
      this.byGroup.set(outer, siblings);
    }
    let node = siblings.get(group);
    if (!node) {
      node = this.append(outer, this.groups[group]);
      siblings.set(group, node);
    }
    return node;
  }
}

/** Add one span of this duration to a node. All of it is self time until a child is counted. */
export function countSpan(node: CallTreeNode, ns: number): void {
  node.spans++;
  node.total += ns;
  node.self += ns;
}

/** The node that contains all other nodes of its tree. */
export function rootOf(node: CallTreeNode): CallTreeNode {
  let root = node;
  while (root.parent) root = root.parent;
  return root;
}
