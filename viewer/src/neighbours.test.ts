import { expect, test } from "vitest";

import { lanesOf } from "./lanes";
import { made } from "./made";
import { alike, type Direction, neighbour } from "./neighbours";

const { spans } = made([
  { at: [0, 50], name: "GPT" },
  { at: [5, 25], name: "block", parent: 0 },
  { at: [10, 20], name: "linear", parent: 1 },
  { at: [30, 45], name: "block", parent: 0 },
  { at: [60, 90], name: "GPT" },
  { at: [61, 62], name: "block", phase: 1, parent: 4 },
]);
const lanes = lanesOf(spans, 1);
const from = (span: number) =>
  (["left", "right", "up", "down"] satisfies Direction[]).map((to) => neighbour(spans, lanes, span, to));

test("along the lane, to the parent, to the first child", () => {
  expect(from(0)).toEqual([-1, 4, -1, 1]);
  expect(from(1)).toEqual([-1, 3, 0, 2]);
  expect(from(3)).toEqual([1, 5, 0, -1]);
  expect(from(2)).toEqual([-1, -1, 1, -1]);
});

test("from nothing to the first slice", () => {
  expect(neighbour(spans, lanes, -1, "right")).toBe(0);
  expect(neighbour(made([]).spans, [[]], -1, "right")).toBe(-1);
});

test("slices of the same name and phase", () => {
  expect(alike(spans, 3)).toEqual({ all: [1, 3], at: 1 });
  expect(alike(spans, 5)).toEqual({ all: [5], at: 0 });
});
