import { expect, test } from "vitest";

import { made } from "./made";
import { finds, matchingNames, nextFind } from "./search";

const { spans, names } = made([
  { at: [0, 9], name: "GPT/GPT/GPT" },
  { at: [1, 4], name: "attn: Attention/GPT.h.0.attn/Attention", parent: 0 },
  { at: [5, 8], name: "mlp: MLP/GPT.h.0.mlp/MLP", parent: 0 },
  { at: [10, 14], name: "attn: Attention/GPT.h.0.attn/Attention" },
]);
const found = (query: string) => [...finds(spans, matchingNames(names, query))];

test("no query wants nothing", () => {
  expect(matchingNames(names, "  ")).toBeNull();
  expect(found("")).toEqual([]);
});

test("label, fqn and class match, whatever their case", () => {
  expect(found("ATTENTION")).toEqual([1, 3]);
  expect(found("h.0")).toEqual([1, 2, 3]);
});

test("every word must match", () => {
  expect(found("h.0 mlp")).toEqual([2]);
  expect(found("h.0 nothing")).toEqual([]);
});

test("what a regular expression would take as its own is text", () => {
  expect(found("h.0.*")).toEqual([]);
});

test("next and previous go around", () => {
  const all = Int32Array.of(1, 3);
  expect([-1, 0, 1, 2, 3].map((span) => nextFind(all, span, 1))).toEqual([1, 1, 3, 3, 1]);
  expect([-1, 0, 1, 2, 3].map((span) => nextFind(all, span, -1))).toEqual([3, 3, 3, 1, 1]);
  expect(nextFind(new Int32Array(0), 1, 1)).toBe(-1);
});
