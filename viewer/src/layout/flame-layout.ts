/** Positions of the cells of the aggregated flame graph. */
import type { CallTreeNode } from "../analysis/merged-tree";

/** Nodes narrower than this fraction of the graph are omitted. */
const MIN_FRACTION = 1 / 600;

export interface FlameCell {
  readonly node: CallTreeNode;
  /** Fractions of the graph's width. */
  readonly left: number;
  readonly width: number;
  readonly row: number;
}

/** The cells of a node, its ancestors above it (each as wide as the graph), and its descendants below it. */
export function layoutFlame(focused: CallTreeNode): FlameCell[] {
  const cells: FlameCell[] = [];
  for (let node = focused.parent; node; node = node.parent) cells.unshift({ node, left: 0, width: 1, row: node.depth });
  const add = (node: CallTreeNode, left: number, width: number) => {
    cells.push({ node, left, width, row: node.depth });
    let childLeft = left;
    for (const child of node.children) {
      const childWidth = node.total > 0 ? (width * child.total) / node.total : 0;
      if (childWidth >= MIN_FRACTION) add(child, childLeft, childWidth);
      childLeft += childWidth;
    }
  };
  if (focused.total > 0) add(focused, 0, 1);
  return cells;
}
