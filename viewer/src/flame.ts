/** Where the cells of the aggregated flame graph lie. */
import type { Node } from "./aggregate";

/** A node narrower than this part of the graph is left out. */
const LEAST = 1 / 600;

export interface Cell {
  readonly node: Node;
  readonly left: number;
  readonly width: number;
  readonly row: number;
}

/** Cells of a node, of what it lies in, and of what lies in it; left and width as parts of the whole. */
export function cellsOf(root: Node): Cell[] {
  const cells: Cell[] = [];
  for (let node = root.parent; node; node = node.parent) cells.unshift({ node, left: 0, width: 1, row: node.depth });
  const add = (node: Node, left: number, width: number) => {
    cells.push({ node, left, width, row: node.depth });
    let at = left;
    for (const child of node.children) {
      const part = node.total > 0 ? (width * child.total) / node.total : 0;
      if (part >= LEAST) add(child, at, part);
      at += part;
    }
  };
  if (root.total > 0) add(root, 0, 1);
  return cells;
}

/** The node that holds all others of its tree. */
export function rootOf(node: Node): Node {
  let root = node;
  while (root.parent) root = root.parent;
  return root;
}
