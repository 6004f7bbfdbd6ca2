import { expect, test } from "vitest";

import { makeTrace } from "../testing/make-trace";
import { countBars, describeBars } from "./bar-counts";
import { matchSpans, parseQuery, QueryError } from "./query";
import { flaggedSpans, nextMatch } from "./search";

const trace = makeTrace(
  [
    { time: [0, 9000], name: "GPT/GPT/GPT" },
    { time: [1000, 4000], name: "attn: Attention/GPT.h.0.attn/Attention", parent: 0 },
    { time: [5000, 8000], name: "mlp: MLP/GPT.h.0.mlp/MLP", parent: 0 },
    { time: [10000, 14000], name: "attn: Attention/GPT.h.0.attn/Attention", phase: 1, track: 1 },
    { time: [11000, 12000], name: "mlp: MLP/GPT.h.0.mlp/MLP", phase: 2, track: 1, parent: 3 },
    { time: [12000, 12500], name: "attn: Attention/GPT.h.0.attn/Attention", track: 2 },
  ],
  ["forward", "backward", "gpu"],
);
const found = (query: string) => [...flaggedSpans(matchSpans(trace, parseQuery(query)))];

test("parseQuery of an empty query is null", () => {
  expect(parseQuery("  ")).toBeNull();
  expect(found("")).toEqual([]);
});

test("matchSpans of a word looks at label and fqn, whatever their case", () => {
  expect(found("ATTENTION")).toEqual([1, 3, 5]);
  expect(found("h.0")).toEqual([1, 2, 3, 4, 5]);
});

test("matchSpans of several terms requires each of them", () => {
  expect(found("h.0 mlp")).toEqual([2, 4]);
  expect(found("h.0 nothing")).toEqual([]);
  expect(found("attn phase:backward >1us")).toEqual([3]);
});

test("matchSpans of a word takes the characters of regular expressions as they are", () => {
  expect(found("h.0.*")).toEqual([]);
});

test("matchSpans of a regular expression between slashes finds what it matches", () => {
  expect(found("/h\\.\\d+\\.(attn|mlp)$/")).toEqual([1, 2, 3, 4, 5]);
  expect(found("/^mlp: MLP$/ phase:forward")).toEqual([2]);
});

test("matchSpans of class, phase and duration compares with these alone", () => {
  expect(found("class:mlp")).toEqual([2, 4]);
  expect(found("class:h.0")).toEqual([]);
  expect(found("phase:recompute")).toEqual([4]);
  expect(found("phase:b")).toEqual([3]);
  expect(found("phase:gpu")).toEqual([5]);
  expect(found(">3us")).toEqual([0, 3]);
  expect(found("<1.5µs")).toEqual([4, 5]);
  expect(found(">2us <0.0035ms")).toEqual([1, 2]);
});

test("parseQuery of what it cannot read says why", () => {
  expect(() => parseQuery("/(/")).toThrow(new QueryError("/(/ is no regular expression"));
  expect(() => parseQuery("phase:sideways")).toThrow("no phase sideways");
});

test("matchSpans of a duration takes any way to write its number", () => {
  expect([found(">3e3ns"), found(">3.e0us"), found(">.003ms"), found(">=3us"), found(">3000.0ns")]).toEqual(
    Array.from({ length: 5 }, () => [0, 3]),
  );
});

test.each([
  [">", ">"],
  [">1", ">"],
  ["<=2", "<"],
  [">1.5m", ">"],
  [">-1ms", ">"],
  ["attn >1e3 us", ">"],
])("parseQuery of %s says how a duration is written", (query, sign) => {
  const term = query.split(" ").find((part) => part.startsWith(sign));
  expect(() => parseQuery(query)).toThrow(
    new QueryError(`${term} is no duration: ${sign}1.5ms, with ns, us, ms or s, without spaces`),
  );
});

test("parseQuery of a name in angle brackets is one of a name", () => {
  expect(parseQuery("<lambda>")!.names).toHaveLength(1);
});

test("countBars and describeBars tell spans from backward passes and communication", () => {
  const bars = makeTrace(
    [0, 1, 2, 2, 3, 3, 4, 5].map((track, i) => ({ time: [i, i + 1], name: "a", track })),
    ["forward", "backward", "backward pass", "communication", "gpu", "ranges"],
  );
  const all = countBars(bars, () => true);
  expect(all).toEqual({ all: 8, spans: 3, passes: 2, communication: 2, ranges: 1 });
  expect(describeBars(all)).toBe("3 spans, 2 backward passes, 2 communication calls, 1 range");
  expect(describeBars(countBars(bars, (bar) => bar === 2))).toBe("1 backward pass");
  expect(describeBars(countBars(bars, () => false))).toBe("0 spans");
});

test("nextMatch in both directions goes around the end", () => {
  const all = Int32Array.of(1, 3);
  expect([-1, 0, 1, 2, 3].map((span) => nextMatch(all, span, 1))).toEqual([1, 1, 3, 3, 1]);
  expect([-1, 0, 1, 2, 3].map((span) => nextMatch(all, span, -1))).toEqual([3, 3, 3, 1, 1]);
  expect(nextMatch(new Int32Array(0), 1, 1)).toBe(-1);
});
