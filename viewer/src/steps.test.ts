import { expect, test } from "vitest";

import { made } from "./made";
import { stepAt, stepsOf } from "./steps";

const trace = made([{ at: [5, 100], name: "a" }], ["forward"], {
  marks: [
    { time: 20, kind: "step", text: "step 0" },
    { time: 30, kind: "mark", text: "eval" },
    { time: 40, kind: "step", text: "" },
  ],
});

test("steps end at their marks, the first begins with the trace", () => {
  expect(stepsOf(trace)).toEqual([
    { start: 5, end: 20, name: "step 0" },
    { start: 20, end: 40, name: "step 1" },
  ]);
});

test("the step at a time", () => {
  expect([0, 19, 20, 39, 40].map((time) => stepAt(stepsOf(trace), time))).toEqual([0, 0, 1, 1, 2]);
});
