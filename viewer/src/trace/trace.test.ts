import { expect, test } from "vitest";
import { countIncomplete, reportLosses } from "../analysis/loss-report";
import { makeTrace } from "../testing/make-trace";
import { extent, selfTime, spansByLink } from "./trace";

const trace = makeTrace([
  { time: [0, 50], name: "GPT", link: 3 },
  { time: [5, 25], name: "block", parent: 0 },
  { time: [10, 20], name: "linear", parent: 1, complete: 0 },
  { time: [50, 90], name: "GPT", phase: 1, link: 3 },
]);

test("selfTime of a span leaves out its children", () => {
  expect([0, 1, 2, 3].map((span) => selfTime(trace.spans, span))).toEqual([30, 10, 10, 40]);
});

test("spansByLink groups the spans of a link", () => {
  expect([...spansByLink(trace.spans)]).toEqual([[3, [0, 3]]]);
});

test("extent of a trace includes marks and counters", () => {
  expect(extent(trace)).toEqual({ start: 0, end: 90 });
  const counter = { name: "", unit: "", process: 0, time: Float64Array.of(-5, 10), value: Float64Array.of(1, 2) };
  expect(extent({ ...trace, counters: [counter] })).toEqual({ start: -5, end: 90 });
  expect(extent({ ...trace, marks: [{ time: 95, kind: "step", text: "" }] })).toEqual({ start: 0, end: 95 });
});

test("extent of an empty trace can be drawn", () => {
  expect(extent(makeTrace([]))).toEqual({ start: 0, end: 1000 });
});

test("reportLosses of a trace with losses gives a sentence for each", () => {
  expect(countIncomplete(trace)).toEqual({ all: 1, spans: 1, passes: 0, communication: 0, ranges: 0 });
  const lost = { ...trace, stats: { recorded: 5000, overwritten: 1200, unfinished: 1 } };
  expect(reportLosses(lost)).toEqual([
    "1,200 of 5,000 events were overwritten by newer ones: what came first is not shown.",
    "1 span never ended: drawn to the last event.",
    "1 span of this timeline is incomplete, drawn with stripes.",
  ]);
  expect(reportLosses(makeTrace([{ time: [0, 1], name: "a" }]))).toEqual([]);
  const calls = [0, 1].map((track) => ({ time: [0, 1] as const, name: "a", track, complete: 0 }));
  expect(reportLosses(makeTrace(calls, ["forward", "communication"]))).toEqual([
    "1 span, 1 communication call of this timeline are incomplete, drawn with stripes.",
  ]);
});
