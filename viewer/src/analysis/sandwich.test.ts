import { expect, test } from "vitest";

import { makeTrace } from "../testing/make-trace";
import type { CallTreeNode } from "./merged-tree";
import { buildSandwich } from "./sandwich";
import { groupsOf } from "./totals";

/*
 * time  0    10   20   30   40   50   60   70   80
 *       |A............................|  |lin......|   0, 5
 *       |B.......| |lin.|  |B.........|                1, 3, 4 → parents
 *        |lin...|           |lin|
 */
const trace = makeTrace([
  { time: [0, 60], name: "A" },
  { time: [0, 18], name: "B", parent: 0 },
  { time: [2, 16], name: "lin", parent: 1 },
  { time: [4, 9], name: "mm", parent: 2 },
  { time: [20, 30], name: "lin", parent: 0 },
  { time: [35, 60], name: "B", parent: 0 },
  { time: [40, 46], name: "lin", parent: 5 },
  { time: [41, 44], name: "lin", parent: 6 },
  { time: [65, 80], name: "lin" },
]);
const groups = groupsOf(trace, "module");
const lin = groups.groups.findIndex(({ title }) => title === "lin");

const lines = (node: CallTreeNode): string[] => [
  `${" ".repeat(node.depth)}${node.label} ${node.total} ${node.self} ${node.spans}`,
  ...node.children.flatMap(lines),
];

test("buildSandwich of a module merges its callers, and theirs, by path", () => {
  // 14 + 6 through B, 10 from A itself, 15 without a caller; the call inside a call is part of it.
  expect(lines(buildSandwich(trace, groups, lin, "cpu", null).callers)).toEqual([
    "lin 45 15 4",
    " B 20 0 2",
    "  A 20 20 2",
    " A 10 10 1",
  ]);
});

test("buildSandwich of a module merges what it calls by path", () => {
  expect(lines(buildSandwich(trace, groups, lin, "cpu", null).callees)).toEqual([
    "lin 45 37 4",
    " mm 5 5 1",
    " lin 3 3 1",
  ]);
});

test("buildSandwich of a range cuts calls at its ends", () => {
  expect(lines(buildSandwich(trace, groups, lin, "cpu", { start: 25, end: 70 }).callers)).toEqual([
    "lin 16 5 3",
    " A 5 5 1",
    " B 6 0 1",
    "  A 6 6 1",
  ]);
});

/* The backward of `A.x` contains a recompute of `A.y`, in which `A.y.lin` runs. */
const checkpointed = makeTrace([
  { time: [0, 100], name: "A", phase: 1 },
  { time: [10, 90], name: "x/A.x/X", phase: 1, parent: 0 },
  { time: [20, 70], name: "y/A.y/Y", phase: 2, parent: 1 },
  { time: [30, 50], name: "lin/A.y.lin/Linear", phase: 2, parent: 2 },
]);
const checkpointedGroups = groupsOf(checkpointed, "module");
const sandwichOf = (title: string) => {
  const group = checkpointedGroups.groups.findIndex((candidate) => candidate.title === title);
  return buildSandwich(checkpointed, checkpointedGroups, group, "cpu", null);
};

test("buildSandwich of a module in whose backward another runs again does not call that", () => {
  expect(lines(sandwichOf("A.x").callees)).toEqual(["x 30 30 1"]);
  expect(lines(sandwichOf("A.x").callers)).toEqual(["x 30 0 1", " A 30 30 1"]);
});

test("buildSandwich of a module that runs again has the modules that contain it as callers", () => {
  expect(lines(sandwichOf("A.y").callees)).toEqual(["y 50 30 1", " lin 20 20 1"]);
  expect(lines(sandwichOf("A.y.lin").callers)).toEqual(["lin 20 0 1", " y 20 0 1", "  A 20 20 1"]);
  expect(lines(sandwichOf("A").callees)).toEqual(["A 100 20 1", " x 30 30 1", " y 50 30 1", "  lin 20 20 1"]);
});
