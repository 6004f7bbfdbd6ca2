import { expect, test } from "vitest";

import { layoutFlame } from "../layout/flame-layout";
import { makeTrace } from "../testing/make-trace";
import { buildCallTree } from "./call-tree";
import { buildSandwich } from "./sandwich";
import { computeTotals, groupsOf, sortTotals, timeOfSteps } from "./totals";

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
  return [found.calls, found.forward, found.backward, found.recompute, found.total, found.self];
};

test("computeTotals of the CPU counts nested spans of a module and phase once", () => {
  const rows = computeTotals(trace, groups, "cpu", null);
  // The recompute of h.1 counts for GPT, which contains it by name.
  expect(row(rows, "GPT")).toEqual([1, 50, 0, 5, 55, 15]);
  expect(row(rows, "GPT.h.0")).toEqual([1, 20, 0, 0, 20, 10]);
  expect(row(rows, "GPT.h.0.lin")).toEqual([1, 10, 0, 0, 10, 10]);
  // The recompute is inside the backward of the same module, so its time is subtracted from that.
  expect(row(rows, "GPT.h.1")).toEqual([1, 15, 15, 5, 35, 35]);
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
  expect(row(rows, "Block")).toEqual([2, 35, 15, 5, 55, 45]);
});

/*
 * time      0   10   20   30   40   50   60   70   80   90  100
 * forward   |model............|                                  0
 *             |l.0 |  |l.1 |                                     1, 2
 * backward                      |model......................|   3
 *                                 |l.1........................|   4, of the innermost layer's backward:
 *                                    |l.1.down..............|     5
 *                                       |l.0 recompute....|       6
 *                                         |l.0.down, rec.|        7
 *                                           |l.1.down|            8, a backward inside the recompute
 */
const layer = (name: string) => `${name}: Layer/model.layers.${name}/Layer`;
const down = (name: string) => `down: Linear/model.layers.${name}.down/Linear`;
const checkpointed = makeTrace(
  [
    { time: [0, 20], name: "model/model/Llama" },
    { time: [2, 8], name: layer("0"), parent: 0 },
    { time: [10, 16], name: layer("1"), parent: 0 },
    { time: [30, 100], name: "model/model/Llama", phase: 1, track: 1 },
    { time: [32, 98], name: layer("1"), phase: 1, track: 1, parent: 3 },
    { time: [36, 95], name: down("1"), phase: 1, track: 1, parent: 4 },
    { time: [40, 90], name: layer("0"), phase: 2, track: 1, parent: 5 },
    { time: [50, 80], name: down("0"), phase: 2, track: 1, parent: 6 },
    { time: [55, 60], name: down("1"), phase: 1, track: 1, parent: 7 },
  ],
  ["forward", "backward"],
);

test("computeTotals counts recompute to what it repeats, not to the module in whose backward it lies", () => {
  const rows = computeTotals(checkpointed, groupsOf(checkpointed, "module"), "cpu", null);
  // Recompute: 20 of layers.0 itself, and 25 of its `down`. Backward: 66 − 50 of layers.1, 59 − 50 and 5 of its `down`.
  expect(row(rows, "model")).toEqual([1, 20, 20, 45, 85, 12]);
  expect(row(rows, "model.layers.0")).toEqual([1, 6, 0, 45, 51, 26]);
  expect(row(rows, "model.layers.1")).toEqual([1, 6, 16, 0, 22, 13]);
  expect(row(rows, "model.layers.1.down")).toEqual([0, 0, 14, 0, 14, 14]);
  expect(row(rows, "model.layers.0.down")).toEqual([0, 0, 0, 25, 25, 25]);
});

test("computeTotals by class counts recompute once to a class", () => {
  const rows = computeTotals(checkpointed, groupsOf(checkpointed, "class"), "cpu", null);
  expect(row(rows, "Layer")).toEqual([2, 12, 16, 45, 73, 39]);
  expect(row(rows, "Linear")).toEqual([0, 0, 14, 25, 39, 39]);
});

test("computeTotals of a range cuts recompute and what it interrupts", () => {
  const rows = computeTotals(checkpointed, groupsOf(checkpointed, "module"), "cpu", { start: 85, end: 96 });
  expect(row(rows, "model")).toEqual([0, 0, 6, 5, 11, 0]);
  expect(row(rows, "model.layers.1.down")).toEqual([0, 0, 5, 0, 5, 5]);
  expect(row(rows, "model.layers.0")).toEqual([0, 0, 0, 5, 5, 5]);
});

test("timeOfSteps is that of all steps, and of no steps nothing", () => {
  const steps = [
    { start: 0, end: 50 },
    { start: 50, end: 75 },
  ];
  expect([timeOfSteps(trace, steps), timeOfSteps(trace, [])]).toEqual([75, 0]);
});

test.each(["module", "class"] as const)("buildSandwich of each %s has the total of its row", (by) => {
  for (const each of [trace, checkpointed]) {
    for (const range of [null, { start: 35, end: 85 }]) {
      const all = groupsOf(each, by);
      for (const { group, total } of computeTotals(each, all, "cpu", range)) {
        const { callers, callees } = buildSandwich(each, all, group, "cpu", range);
        expect([callers.total, callees.total]).toEqual([total, total]);
      }
    }
  }
});

test("sortTotals by a field puts equal rows in the order of titles", () => {
  const rows = computeTotals(trace, groups, "cpu", null);
  expect(sortTotals(rows, "total", true).map(({ total }) => total)).toEqual([55, 35, 20, 10]);
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
