import { expect, test } from "vitest";

import { markStride } from "./mark-density";

const marks = (times: number[]) => times.map((time) => ({ time, kind: "step", text: "" }));

test("markStride of marks far enough apart is 1", () => {
  expect(markStride(marks([0, 100, 200]), 1, 100)).toBe(1);
});

test("markStride of marks too close together is a power of two", () => {
  expect(markStride(marks([0, 100, 200]), 1, 101)).toBe(2);
  expect(markStride(marks([0, 100, 200]), 10, 35)).toBe(4);
});

test("markStride of one mark, of none and of marks at one time is defined", () => {
  expect([markStride([], 1, 90), markStride(marks([5]), 1, 90), markStride(marks([5, 5]), 1, 90)]).toEqual([1, 1, 2]);
});
