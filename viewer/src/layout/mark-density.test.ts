import { expect, test } from "vitest";

import { nameStride } from "./mark-density";

const marks = (times: number[]) => times.map((time) => ({ time, kind: "step", text: "" }));

test("nameStride of marks far enough apart is 1", () => {
  expect(nameStride(marks([0, 100, 200]), 1, 100)).toBe(1);
});

test("nameStride of marks too close together is a power of two", () => {
  expect(nameStride(marks([0, 100, 200]), 1, 101)).toBe(2);
  expect(nameStride(marks([0, 100, 200]), 10, 35)).toBe(4);
});

test("nameStride of one mark, of none and of marks at one time is defined", () => {
  expect([nameStride([], 1, 90), nameStride(marks([5]), 1, 90), nameStride(marks([5, 5]), 1, 90)]).toEqual([1, 1, 2]);
});
