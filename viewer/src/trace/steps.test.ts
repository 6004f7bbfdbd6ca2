import { expect, test } from "vitest";

import { makeTrace, type SpanRow } from "../testing/make-trace";
import { medianDuration, shownStep, stepAt, stepBeside, stepsOf } from "./steps";

const stepMark = (time: number, text: string) => ({ time, kind: "step", text });
const span = (start: number, end: number, step: number): SpanRow => ({ time: [start, end], name: "a", step });

const trace = makeTrace([span(5, 15, 0), span(21, 35, 1), span(45, 55, 2)], ["forward"], {
  marks: [stepMark(20, "step 0"), { time: 30, kind: "mark", text: "eval" }, stepMark(40, ""), stepMark(60, "step 2")],
});
const steps = stepsOf(trace);

test("stepsOf marks ends each step at its mark and begins the first with the first span", () => {
  const counter = { name: "", unit: "", process: 0, time: Float64Array.of(-9, 99), value: Float64Array.of(1, 2) };
  for (const recorded of [trace, { ...trace, counters: [counter] }]) {
    expect(stepsOf(recorded)).toEqual([
      { start: 5, end: 20, name: "step 0", isWhole: true },
      { start: 20, end: 40, name: "step 1", isWhole: true },
      { start: 40, end: 60, name: "step 2", isWhole: true },
    ]);
  }
});

test("stepsOf begins the first step where a range before its first span begins, as modtrace summary does", () => {
  const withParts = (start: number) => {
    const step = { start, end: 20, name: "step 0", isWhole: true };
    return { ...trace, stepParts: { parts: [], steps: [step], causes: [null], ns: new Float64Array() } };
  };
  expect(stepsOf(withParts(2))[0].start).toBe(2);
  // Spans before a mark belong to another step.
  const marks = [stepMark(4, "before"), ...trace.marks];
  expect(stepsOf({ ...withParts(2), marks })[0].start).toBe(4);
});

test("stepsOf marks before the first span and after each other leaves out ranges without a span", () => {
  const marks = [stepMark(5, "step 0"), stepMark(20, "step 1"), stepMark(20, "step 2"), stepMark(40, "step 3")];
  expect(stepsOf({ ...trace, marks }).map(({ start, end, name }) => [start, end, name])).toEqual([
    [5, 20, "step 1"],
    [20, 40, "step 3"],
    [40, 55, "step 2, not ended"],
  ]);
});

test("stepsOf marks between which only other bars start leaves them out", () => {
  // A backward pass that is waited for, a collective and a kernel: none of these is a module's span on a thread.
  const rows = [
    span(5, 15, 0),
    { ...span(25, 30, 1), track: 1 },
    { ...span(45, 50, 2), track: 2 },
    { ...span(65, 70, 3), track: 3 },
    span(85, 95, 4),
    { ...span(105, 110, 5), track: 2 },
  ];
  const marks = [20, 40, 60, 80, 100].map((time, i) => stepMark(time, `step ${i}`));
  const found = stepsOf(makeTrace(rows, ["forward", "backward pass", "communication", "gpu"], { marks }));
  expect(found).toEqual([
    { start: 5, end: 20, name: "step 0", isWhole: true },
    { start: 80, end: 100, name: "step 4", isWhole: true },
  ]);
  expect([stepBeside(found, { start: 5, end: 20 }, 1), stepBeside(found, { start: 80, end: 100 }, -1)]).toEqual([1, 0]);
});

test("stepsOf a recording whose beginning was overwritten has a first step that is not whole", () => {
  const overwritten = stepsOf({ ...trace, stats: { overwritten: 1 } });
  expect(overwritten.map(({ isWhole }) => isWhole)).toEqual([false, true, true]);
});

test("medianDuration of an even number of steps is the mean of the two middle ones, and of whole steps only", () => {
  const lasting = (...durations: number[]) =>
    durations.map((ns) => ({ start: 100, end: 100 + ns, name: "", isWhole: ns < 1000 }));
  expect(medianDuration(lasting(30, 10, 80, 20))).toBe(25);
  expect(medianDuration(lasting(30, 10, 80))).toBe(30);
  expect(medianDuration(lasting(9000, 10, 30, 7000))).toBe(20);
  expect(medianDuration(lasting(9000, 8000))).toBe(8500);
});

test("stepsOf ranks that lie apart in time are those of the first rank", () => {
  const processes = [0, 1].map((rank) => ({ pid: rank, rank, name: `rank ${rank}` }));
  const marks = [stepMark(1020, "step 0"), stepMark(1040, "step 1")];
  const track = (process: number) => ({ kind: "forward", thread: "MainThread", tid: 1, process, name: "forward" });
  const rows = (late: number) => [
    { ...span(5, 15, 0), track: 1 },
    span(1005, 1015, 0),
    span(1021, 1035, 1),
    { ...span(late, late + 10, 1), track: 1 },
  ];
  const ranks = (late: number) => makeTrace(rows(late), [], { processes, marks, tracks: [track(0), track(1)] });
  for (const apart of [ranks(1100), ranks(1039)]) {
    expect(stepsOf(apart)).toEqual([
      { start: 1005, end: 1020, name: "step 0", isWhole: true },
      { start: 1020, end: 1040, name: "step 1", isWhole: true },
    ]);
  }
  const unended = { ...ranks(1100), marks: marks.slice(0, 1) };
  expect(stepsOf(unended)[1]).toEqual({ start: 1020, end: 1035, name: "step 1, not ended", isWhole: false });
  const whole = { start: 0, end: 1110 };
  expect([shownStep(stepsOf(ranks(1100)), whole), stepBeside(stepsOf(ranks(1100)), whole, 1)]).toEqual([-1, 0]);
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
