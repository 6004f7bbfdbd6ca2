import { expect, test } from "vitest";

import { cellSize, lanesOf, lowerBound, sliceAt, visible } from "./lanes";
import { made } from "./made";

const drawn = (at: [number, number][], from: number, to: number, nsPerPixel: number, wanted: Uint8Array | null = null) => {
  const { spans } = made(at.map((at, i) => ({ at, name: `n${i}` })));
  const result: number[][] = [];
  visible(lanesOf(spans, 1)[0][0], spans, from, to, nsPerPixel, wanted, (...box) => result.push(box));
  return result;
};

test("a lane per track and depth, in start order", () => {
  const { spans } = made(
    [
      { at: [0, 10], name: "a" },
      { at: [1, 4], name: "b", parent: 0 },
      { at: [2, 3], name: "c", track: 1 },
      { at: [5, 9], name: "d", parent: 0 },
    ],
    ["forward", "backward"],
  );
  const lanes = lanesOf(spans, 2);
  expect(lanes.map((depths) => depths.map((lane) => [...lane.spans]))).toEqual([[[0], [1, 3]], [[2]]]);
  expect([...lanes[0][1].reach]).toEqual([4, 9]);
});

test("lower bound", () => {
  expect([0, 1, 2, 3, 9].map((wanted) => lowerBound([1, 3, 3], wanted))).toEqual([0, 0, 1, 1, 3]);
});

test("a cell is a power of two and at least a pixel", () => {
  expect([1, 3, 4, 1000, 0.3].map(cellSize)).toEqual([1, 4, 4, 1024, 0.5]);
});

test("what lies outside the window is not drawn", () => {
  expect(drawn([[0, 10], [20, 30], [40, 50]], 15, 35, 1)).toEqual([[1, 20, 30, 1]]);
});

test("slices that the window cuts are drawn whole", () => {
  expect(drawn([[0, 20], [20, 40]], 10, 25, 1)).toEqual([[0, 0, 20, 1], [1, 20, 40, 1]]);
});

test("slices thinner than a pixel are one rectangle, the longest stands for them", () => {
  expect(drawn([[0, 1], [2, 5], [6, 7], [8, 9]], 0, 100, 8)).toEqual([[1, 0, 7, 3], [3, 8, 9, 1]]);
});

test("a wanted slice stands for its cell, however short", () => {
  expect(drawn([[0, 1], [2, 5]], 0, 100, 8, Uint8Array.of(1, 0))).toEqual([[0, 0, 5, 2]]);
});

test("a wide slice ends what is merged", () => {
  expect(drawn([[0, 1], [2, 20], [20, 21]], 0, 100, 8)).toEqual([[0, 0, 1, 1], [1, 2, 20, 1], [2, 20, 21, 1]]);
});

test("rectangles do not change while the window moves", () => {
  const slices = Array.from({ length: 400 }, (_, i): [number, number] => [i * 3, i * 3 + 2]);
  const inner = (boxes: number[][]) => boxes.filter(([, start, end]) => start >= 400 && end <= 800);
  expect(inner(drawn(slices, 401 - 10, 900, 8))).toEqual(inner(drawn(slices, 0, 1200, 8)));
});

test("the slice at a time, or the nearest in reach", () => {
  const { spans } = made([{ at: [10, 20], name: "a" }, { at: [30, 31], name: "b" }]);
  const [lane] = lanesOf(spans, 1)[0];
  expect([5, 9, 10, 20, 24, 28, 33, 40].map((time) => sliceAt(lane, spans, time, 3))).toEqual([-1, 0, 0, 0, -1, 1, 1, -1]);
});

test("a slice of no length is found where it is", () => {
  const { spans } = made([{ at: [10, 10], name: "a" }]);
  expect(sliceAt(lanesOf(spans, 1)[0][0], spans, 10, 0)).toBe(0);
});
