import { expect, test } from "vitest";

import { makeTrace } from "../testing/make-trace";
import { matchingNames, matchingSpans, nextMatch } from "./search";

const { spans, names } = makeTrace([
  { time: [0, 9], name: "GPT/GPT/GPT" },
  { time: [1, 4], name: "attn: Attention/GPT.h.0.attn/Attention", parent: 0 },
  { time: [5, 8], name: "mlp: MLP/GPT.h.0.mlp/MLP", parent: 0 },
  { time: [10, 14], name: "attn: Attention/GPT.h.0.attn/Attention" },
]);
const matches = (query: string) => [...matchingSpans(spans, matchingNames(names, query))];

test("matchingNames of an empty query is null", () => {
  expect(matchingNames(names, "  ")).toBeNull();
  expect(matches("")).toEqual([]);
});

test("matchingNames looks at label, fqn and class, whatever their case", () => {
  expect(matches("ATTENTION")).toEqual([1, 3]);
  expect(matches("h.0")).toEqual([1, 2, 3]);
});

test("matchingNames of several words requires each of them", () => {
  expect(matches("h.0 mlp")).toEqual([2]);
  expect(matches("h.0 nothing")).toEqual([]);
});

test("matchingNames takes the characters of regular expressions as they are", () => {
  expect(matches("h.0.*")).toEqual([]);
});

test("nextMatch in both directions goes around the end", () => {
  const all = Int32Array.of(1, 3);
  expect([-1, 0, 1, 2, 3].map((span) => nextMatch(all, span, 1))).toEqual([1, 1, 3, 3, 1]);
  expect([-1, 0, 1, 2, 3].map((span) => nextMatch(all, span, -1))).toEqual([3, 3, 3, 1, 1]);
  expect(nextMatch(new Int32Array(0), 1, 1)).toBe(-1);
});
