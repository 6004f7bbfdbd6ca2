import { expect, test } from "vitest";

import { layoutFlame } from "../layout/flame-layout";
import { makeTrace } from "../testing/make-trace";
import { buildCallTree } from "./call-tree";
import { computeTotals, groupsOf, sortTotals } from "./totals";

/*
 * time     0    10   20   30   40   50   60   70
 * forward  |GPT.....................|                 0
 *            |h.0......|  |h.1...|                    1, 3
 *              |lin|                                  2
 * backward                            |h.1 .......|   4, and inside it a recompute of h.1: 5
 * gpu        |kernel|                                 6
 */
const trace = makeTrace(
  [
    { time: [0, 50], name: "GPT/GPT/GPT" },
    { time: [5, 25], name: "h.0: Block/GPT.h.0/Block", parent: 0 },
    { time: [10, 20], name: "lin: Linear/GPT.h.0.lin/Linear", parent: 1 },
    { time: [30, 45], name: "h.1: Block/GPT.h.1/Block", parent: 0 },
    { time: [50, 70], name: "h.1: Block/GPT.h.1/Block", phase: 1, track: 1 },
    { time: [55, 60], name: "h.1: Block/GPT.h.1/Block", phase: 2, track: 1, parent: 4 },
    { time: [62, 66], name: "gemm/GPT.h.0.lin/gemm", track: 2 },
  ],
  ["forward", "backward", "gpu"],
);
const groups = groupsOf(trace, "module");
const row = (rows: ReturnType<typeof computeTotals>, title: string) => {
  const found = rows.find((candidate) => candidate.title === title)!;
  return [found.spans, found.forward, found.backward, found.recompute, found.total, found.self];
};

test("computeTotals of the CPU counts nested spans of a module once", () => {
  const rows = computeTotals(trace, groups, "cpu", null);
  expect(row(rows, "GPT")).toEqual([1, 50, 0, 0, 50, 15]);
  expect(row(rows, "GPT.h.0")).toEqual([1, 20, 0, 0, 20, 10]);
  expect(row(rows, "GPT.h.0.lin")).toEqual([1, 10, 0, 0, 10, 10]);
  // The recompute lies inside the backward of the same module: the total has it once.
  expect(row(rows, "GPT.h.1")).toEqual([3, 15, 20, 5, 35, 35]);
  expect(rows.length).toBe(4);
});

test("computeTotals of the CPU gives self times that add up to all time", () => {
  const rows = computeTotals(trace, groups, "cpu", null);
  expect(rows.reduce((sum, total) => sum + total.self, 0)).toBe(70);
});

test("computeTotals of a range cuts spans at its ends", () => {
  const rows = computeTotals(trace, groups, "cpu", { start: 15, end: 40 });
  expect(row(rows, "GPT")).toEqual([1, 25, 0, 0, 25, 5]);
  expect(row(rows, "GPT.h.0")).toEqual([1, 10, 0, 0, 10, 5]);
  expect(row(rows, "GPT.h.0.lin")).toEqual([1, 5, 0, 0, 5, 5]);
  expect(row(rows, "GPT.h.1")).toEqual([1, 10, 0, 0, 10, 10]);
});

test("computeTotals of the GPU groups kernels by their module", () => {
  const rows = computeTotals(trace, groups, "gpu", null);
  expect(rows.map(({ title, total }) => [title, total])).toEqual([["GPT.h.0.lin", 4]]);
});

test("computeTotals by class merges modules of one class", () => {
  const rows = computeTotals(trace, groupsOf(trace, "class"), "cpu", null);
  expect(row(rows, "Block")).toEqual([4, 35, 20, 5, 55, 45]);
});

test("sortTotals by a field puts equal rows in the order of titles", () => {
  const rows = computeTotals(trace, groups, "cpu", null);
  expect(sortTotals(rows, "total", true).map(({ total }) => total)).toEqual([50, 35, 20, 10]);
  expect(sortTotals(rows, "self", false).map(({ title }) => title)).toEqual([
    "GPT.h.0",
    "GPT.h.0.lin",
    "GPT",
    "GPT.h.1",
  ]);
});

test("buildCallTree merges calls by path, forward and backward apart", () => {
  const root = buildCallTree(trace, groups, "cpu", null);
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

test("buildCallTree by class merges layers", () => {
  const [forward] = buildCallTree(trace, groupsOf(trace, "class"), "cpu", null).children;
  expect(forward.children[0].children.map(({ title, total, spans }) => [title, total, spans])).toEqual([
    ["Block", 35, 2],
  ]);
});

test("layoutFlame of the root puts cells inside their parent from its left", () => {
  const root = buildCallTree(trace, groups, "cpu", null);
  const cell = (title: string) => layoutFlame(root).find(({ node }) => node.title === title)!;
  expect([cell("all").left, cell("all").width]).toEqual([0, 1]);
  expect(cell("backward").left).toBeCloseTo(50 / 70);
  expect(cell("GPT.h.0").width).toBeCloseTo(20 / 70);
  expect(cell("GPT.h.0").row).toBe(3);
});

test("layoutFlame of a node makes it and its ancestors as wide as the graph", () => {
  const block = buildCallTree(trace, groups, "cpu", null).children[0].children[0].children[0];
  const cells = layoutFlame(block).map(({ node, left, width }) => [node.title, left, width]);
  expect(cells).toEqual([
    ["all", 0, 1],
    ["forward", 0, 1],
    ["GPT", 0, 1],
    ["GPT.h.0", 0, 1],
    ["GPT.h.0.lin", 0, 0.5],
  ]);
});

test("computeTotals and layoutFlame of an empty range are empty", () => {
  const range = { start: 500, end: 600 };
  expect(computeTotals(trace, groups, "cpu", range)).toEqual([]);
  expect(layoutFlame(buildCallTree(trace, groups, "cpu", range))).toEqual([]);
});
