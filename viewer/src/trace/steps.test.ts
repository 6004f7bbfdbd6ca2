import { expect, test } from "vitest";

import { makeTrace } from "../testing/make-trace";
import { stepAt, stepsOf } from "./steps";

const trace = makeTrace([{ time: [5, 100], name: "a" }], ["forward"], {
  marks: [
    { time: 20, kind: "step", text: "step 0" },
    { time: 30, kind: "mark", text: "eval" },
    { time: 40, kind: "step", text: "" },
  ],
});

test("stepsOf marks ends each step at its mark and begins the first with the trace", () => {
  expect(stepsOf(trace)).toEqual([
    { start: 5, end: 20, name: "step 0" },
    { start: 20, end: 40, name: "step 1" },
  ]);
});

test("stepAt a time finds the step it lies in", () => {
  expect([0, 19, 20, 39, 40].map((time) => stepAt(stepsOf(trace), time))).toEqual([0, 0, 1, 1, 2]);
});
