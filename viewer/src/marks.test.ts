import { expect, test } from "vitest";

import { markStride } from "./marks";

const marks = (times: number[]) => times.map((time) => ({ time, kind: "step", text: "" }));

test("all marks where they are far enough apart", () => {
  expect(markStride(marks([0, 100, 200]), 1, 100)).toBe(1);
});

test("every second, fourth … where they are not", () => {
  expect(markStride(marks([0, 100, 200]), 1, 101)).toBe(2);
  expect(markStride(marks([0, 100, 200]), 10, 35)).toBe(4);
});

test("one mark, none, and several at one time", () => {
  expect([markStride([], 1, 90), markStride(marks([5]), 1, 90), markStride(marks([5, 5]), 1, 90)]).toEqual([1, 1, 2]);
});
