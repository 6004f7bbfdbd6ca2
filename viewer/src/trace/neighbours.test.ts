import { expect, test } from "vitest";
import { makeTrace } from "../testing/make-trace";
import { buildDepthLevels } from "./depth-levels";
import { type Direction, neighbour, sameCall } from "./neighbours";

const { spans } = makeTrace([
  { time: [0, 50], name: "GPT" },
  { time: [5, 25], name: "block", parent: 0 },
  { time: [10, 20], name: "linear", parent: 1 },
  { time: [30, 45], name: "block", parent: 0 },
  { time: [60, 90], name: "GPT" },
  { time: [61, 62], name: "block", phase: 1, parent: 4 },
]);
const levels = buildDepthLevels(spans, 1);
const from = (span: number) =>
  (["left", "right", "up", "down"] satisfies Direction[]).map((to) => neighbour(spans, levels, span, to));

test("neighbour in each direction is along the level, the parent, the first child", () => {
  expect(from(0)).toEqual([-1, 4, -1, 1]);
  expect(from(1)).toEqual([-1, 3, 0, 2]);
  expect(from(3)).toEqual([1, 5, 0, -1]);
  expect(from(2)).toEqual([-1, -1, 1, -1]);
});

test("neighbour of no span is the first span", () => {
  expect(neighbour(spans, levels, -1, "right")).toBe(0);
  expect(neighbour(makeTrace([]).spans, [[]], -1, "right")).toBe(-1);
});

test("sameCall of a span lists those of its name and phase", () => {
  expect(sameCall(spans, 3)).toEqual({ calls: [1, 3], position: 1 });
  expect(sameCall(spans, 5)).toEqual({ calls: [5], position: 0 });
});
