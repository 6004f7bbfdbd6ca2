import { expect, test } from "vitest";

import { makeTrace } from "../testing/make-trace";
import { binOf, callStats, percentile } from "./call-stats";
import { groupsOf } from "./totals";

/* Ten forwards of 10, 20, … 100 ns; a backward of 1000 ns that contains a nested part of the same module. */
const forwards = Array.from({ length: 10 }, (_, i) => ({
  time: [i * 200, i * 200 + 10 * (i + 1)] as const,
  name: "lin: Linear/GPT.lin/Linear",
}));
const trace = makeTrace(
  [
    ...forwards,
    { time: [2000, 3000], name: "lin: Linear/GPT.lin/Linear", phase: 1, track: 1 },
    { time: [2100, 2200], name: "lin: Linear/GPT.lin/Linear", phase: 1, track: 1, parent: 10 },
    { time: [2300, 2400], name: "act: GELU/GPT.act/GELU", phase: 1, track: 1, parent: 10 },
  ],
  ["forward", "backward"],
);
const groups = groupsOf(trace, "module");

test("percentile of ascending values is the nearest rank", () => {
  expect([0, 10, 50, 95, 100].map((percent) => percentile([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], percent))).toEqual([
    1, 1, 5, 10, 10,
  ]);
});

test("binOf durations divides the logarithm of their range", () => {
  expect([1, 10, 99, 100].map((ns) => binOf(ns, 1, 100))).toEqual([0, 12, 23, 23]);
  expect(binOf(7, 7, 7)).toBe(0);
});

test("callStats of a module gives the spread per phase and counts nested parts once", () => {
  const stats = callStats(trace, groups, 0, "cpu", null).map(({ bins, ...rest }) => ({
    ...rest,
    counted: bins.reduce((a, b) => a + b),
  }));
  expect(stats).toEqual([
    { phase: "forward", calls: 10, min: 10, p50: 55, p95: 100, max: 100, longest: 9, counted: 10 },
    { phase: "backward", calls: 1, min: 1000, p50: 1000, p95: 1000, max: 1000, longest: 10, counted: 1 },
  ]);
});

test("callStats of a range has the calls that lie in it, uncut", () => {
  const [stats] = callStats(trace, groups, 0, "cpu", { start: 205, end: 601 });
  expect([stats.calls, stats.min, stats.max]).toEqual([3, 20, 40]);
  expect(callStats(trace, groups, 0, "gpu", null)).toEqual([]);
});
