import { expect, test } from "vitest";

import { incompleteIn, lossesOf } from "./losses";
import { made } from "./made";
import { extent, linked, selfTime } from "./trace";

const trace = made([
  { at: [0, 50], name: "GPT", link: 3 },
  { at: [5, 25], name: "block", parent: 0 },
  { at: [10, 20], name: "linear", parent: 1, complete: 0 },
  { at: [50, 90], name: "GPT", phase: 1, link: 3 },
]);

test("self time is what no child covers", () => {
  expect([0, 1, 2, 3].map((span) => selfTime(trace.spans, span))).toEqual([30, 10, 10, 40]);
});

test("slices of one link", () => {
  expect([...linked(trace.spans)]).toEqual([[3, [0, 3]]]);
});

test("the extent takes in marks and counters", () => {
  expect(extent(trace)).toEqual({ start: 0, end: 90 });
  const counter = { name: "", unit: "", process: 0, time: Float64Array.of(-5, 10), value: Float64Array.of(1, 2) };
  expect(extent({ ...trace, counters: [counter] })).toEqual({ start: -5, end: 90 });
  expect(extent({ ...trace, marks: [{ time: 95, kind: "step", text: "" }] })).toEqual({ start: 0, end: 95 });
});

test("an empty trace has an extent that can be drawn", () => {
  expect(extent(made([]))).toEqual({ start: 0, end: 1000 });
});

test("losses in sentences", () => {
  expect(incompleteIn(trace)).toBe(1);
  const lost = { ...trace, stats: { recorded: 5000, overwritten: 1200, unfinished: 1 } };
  expect(lossesOf(lost)).toEqual([
    "1,200 of 5,000 events were overwritten by newer ones: what came first is not shown.",
    "1 slice never ended: drawn to the last event.",
    "1 slice of this timeline is incomplete, drawn with stripes.",
  ]);
  expect(lossesOf(made([{ at: [0, 1], name: "a" }]))).toEqual([]);
});
