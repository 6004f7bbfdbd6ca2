import { expect, test } from "vitest";

import { groupsOf, sorted, totals, tree } from "./aggregate";
import { cellsOf } from "./flame";
import { made } from "./made";

/*
 * time     0    10   20   30   40   50   60   70
 * forward  |GPT.....................|                 0
 *            |h.0......|  |h.1...|                    1, 3
 *              |lin|                                  2
 * backward                            |h.1 .......|   4, and inside it a recompute of h.1: 5
 * gpu        |kernel|                                 6
 */
const trace = made(
  [
    { at: [0, 50], name: "GPT/GPT/GPT" },
    { at: [5, 25], name: "h.0: Block/GPT.h.0/Block", parent: 0 },
    { at: [10, 20], name: "lin: Linear/GPT.h.0.lin/Linear", parent: 1 },
    { at: [30, 45], name: "h.1: Block/GPT.h.1/Block", parent: 0 },
    { at: [50, 70], name: "h.1: Block/GPT.h.1/Block", phase: 1, track: 1 },
    { at: [55, 60], name: "h.1: Block/GPT.h.1/Block", phase: 2, track: 1, parent: 4 },
    { at: [62, 66], name: "gemm/GPT.h.0.lin/gemm", track: 2 },
  ],
  ["forward", "backward", "gpu"],
);
const groups = groupsOf(trace, "module");
const row = (rows: ReturnType<typeof totals>, title: string) => {
  const { slices, forward, backward, recompute, total, self } = rows.find((row) => row.title === title)!;
  return [slices, forward, backward, recompute, total, self];
};

test("totals of all on the CPU", () => {
  const rows = totals(trace, groups, "cpu", null);
  expect(row(rows, "GPT")).toEqual([1, 50, 0, 0, 50, 15]);
  expect(row(rows, "GPT.h.0")).toEqual([1, 20, 0, 0, 20, 10]);
  expect(row(rows, "GPT.h.0.lin")).toEqual([1, 10, 0, 0, 10, 10]);
  // The recompute lies inside the backward of the same module: the total has it once.
  expect(row(rows, "GPT.h.1")).toEqual([3, 15, 20, 5, 35, 35]);
  expect(rows.length).toBe(4);
});

test("self times are all the time there is", () => {
  const rows = totals(trace, groups, "cpu", null);
  expect(rows.reduce((sum, { self }) => sum + self, 0)).toBe(70);
});

test("totals of a range are cut at its ends", () => {
  const rows = totals(trace, groups, "cpu", { start: 15, end: 40 });
  expect(row(rows, "GPT")).toEqual([1, 25, 0, 0, 25, 5]);
  expect(row(rows, "GPT.h.0")).toEqual([1, 10, 0, 0, 10, 5]);
  expect(row(rows, "GPT.h.0.lin")).toEqual([1, 5, 0, 0, 5, 5]);
  expect(row(rows, "GPT.h.1")).toEqual([1, 10, 0, 0, 10, 10]);
});

test("totals of the GPU, by the module that its kernels are of", () => {
  const rows = totals(trace, groups, "gpu", null);
  expect(rows.map(({ title, total }) => [title, total])).toEqual([["GPT.h.0.lin", 4]]);
});

test("totals by class", () => {
  const rows = totals(trace, groupsOf(trace, "class"), "cpu", null);
  expect(row(rows, "Block")).toEqual([4, 35, 20, 5, 55, 45]);
});

test("rows in an order, equal ones by title", () => {
  const rows = totals(trace, groups, "cpu", null);
  expect(sorted(rows, "total", true).map(({ total }) => total)).toEqual([50, 35, 20, 10]);
  expect(sorted(rows, "self", false).map(({ title }) => title)).toEqual(["GPT.h.0", "GPT.h.0.lin", "GPT", "GPT.h.1"]);
});

test("the tree merges calls by path, forward and backward apart", () => {
  const root = tree(trace, groups, "cpu", null);
  const lines: string[] = [];
  const walk = (node: typeof root) => {
    lines.push(`${" ".repeat(node.depth)}${node.label} ${node.total} ${node.self}`);
    node.children.forEach(walk);
  };
  walk(root);
  expect(lines).toEqual([
    "all 70 0",
    " forward 50 0",
    "  GPT 50 15",
    "   h.0: Block 20 10",
    "    lin: Linear 10 10",
    "   h.1: Block 15 15",
    " backward 20 0",
    "  h.1: Block 20 15",
    "   h.1: Block 5 5",
  ]);
});

test("by class, layers are one", () => {
  const [forward] = tree(trace, groupsOf(trace, "class"), "cpu", null).children;
  expect(forward.children[0].children.map(({ title, total, slices }) => [title, total, slices])).toEqual([["Block", 35, 2]]);
});

test("cells lie inside their parent, beginning at its left", () => {
  const root = tree(trace, groups, "cpu", null);
  const cell = (title: string) => cellsOf(root).find(({ node }) => node.title === title)!;
  expect([cell("all").left, cell("all").width]).toEqual([0, 1]);
  expect(cell("backward").left).toBeCloseTo(50 / 70);
  expect(cell("GPT.h.0").width).toBeCloseTo(20 / 70);
  expect(cell("GPT.h.0").row).toBe(3);
});

test("zoomed to a node, it and all around it are as wide as the graph", () => {
  const block = tree(trace, groups, "cpu", null).children[0].children[0].children[0];
  const cells = cellsOf(block).map(({ node, left, width }) => [node.title, left, width]);
  expect(cells).toEqual([["all", 0, 1], ["forward", 0, 1], ["GPT", 0, 1], ["GPT.h.0", 0, 1], ["GPT.h.0.lin", 0, 0.5]]);
});

test("nothing in the range, no rows and no cells", () => {
  const range = { start: 500, end: 600 };
  expect(totals(trace, groups, "cpu", range)).toEqual([]);
  expect(cellsOf(tree(trace, groups, "cpu", range))).toEqual([]);
});
