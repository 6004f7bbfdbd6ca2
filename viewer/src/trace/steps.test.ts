import { expect, test } from "vitest";

import { makeTrace, type SpanRow } from "../testing/make-trace";
import { shownStep, stepAt, stepBeside, stepsOf } from "./steps";

const stepMark = (time: number, text: string) => ({ time, kind: "step", text });
const span = (start: number, end: number, step: number): SpanRow => ({ time: [start, end], name: "a", step });

const trace = makeTrace([span(5, 15, 0), span(21, 35, 1), span(45, 55, 2)], ["forward"], {
  marks: [stepMark(20, "step 0"), { time: 30, kind: "mark", text: "eval" }, stepMark(40, ""), stepMark(60, "step 2")],
});
const steps = stepsOf(trace);

test("stepsOf marks ends each step at its mark and begins the first with the trace", () => {
  expect(steps).toEqual([
    { start: 5, end: 20, name: "step 0" },
    { start: 20, end: 40, name: "step 1" },
    { start: 40, end: 60, name: "step 2" },
  ]);
});

test("stepsOf marks before the first span and after each other leaves out ranges without a span", () => {
  const marks = [stepMark(5, "step 0"), stepMark(20, "step 1"), stepMark(20, "step 2"), stepMark(40, "step 3")];
  expect(stepsOf({ ...trace, marks }).map(({ start, end, name }) => [start, end, name])).toEqual([
    [5, 20, "step 1"],
    [20, 40, "step 3"],
    [40, 55, "step 2, not ended"],
  ]);
});

test("stepsOf a trace without marks is empty", () => {
  expect(stepsOf({ ...trace, marks: [] })).toEqual([]);
});

test("stepAt a time finds the step it lies in", () => {
  expect([0, 19, 20, 39, 40, 60].map((time) => stepAt(steps, time))).toEqual([0, 0, 1, 1, 2, 3]);
});

test("shownStep of a viewport is the one step in it", () => {
  expect(shownStep(steps, { start: 4.7, end: 20.3 })).toBe(0);
  expect(shownStep(steps, { start: 25, end: 26 })).toBe(1);
  expect(shownStep(steps, { start: 0, end: 60 })).toBe(-1);
  expect(shownStep(steps, { start: 60, end: 61 })).toBe(-1);
});

test("stepBeside a shown step is the next one and none beyond the ends", () => {
  expect(stepBeside(steps, { start: 25, end: 26 }, 1)).toBe(2);
  expect(stepBeside(steps, { start: 25, end: 26 }, -1)).toBe(0);
  expect(stepBeside(steps, { start: 5, end: 20 }, -1)).toBe(-1);
  expect(stepBeside(steps, { start: 40, end: 60 }, 1)).toBe(-1);
});

test("stepBeside a viewport of several steps is the first or the last wholly in sight", () => {
  expect([stepBeside(steps, { start: 0, end: 70 }, 1), stepBeside(steps, { start: 0, end: 70 }, -1)]).toEqual([0, 2]);
  expect([stepBeside(steps, { start: 10, end: 50 }, 1), stepBeside(steps, { start: 10, end: 50 }, -1)]).toEqual([1, 1]);
});
