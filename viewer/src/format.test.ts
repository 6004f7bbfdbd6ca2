import { expect, test } from "vitest";

import {
  compareValues,
  formatDuration,
  formatMoment,
  formatQuantity,
  plural,
  shortenFromLeft,
  visibleText,
} from "./format";

test.each([
  [0, "0 ns"],
  [7, "7 ns"],
  [999, "999 ns"],
  [1500, "1.5 µs"],
  [999_960, "1 ms"],
  [12_345_678, "12.35 ms"],
  [3.2e9, "3.2 s"],
  [-1500, "-1.5 µs"],
])("formatDuration of %d ns is %s", (ns, text) => expect(formatDuration(ns)).toBe(text));

test.each([
  [0, "0 ns"],
  [10, "10 ns"],
  [12_345_678, "12.345678 ms"],
  [20_000_000, "20 ms"],
  [1_000_000_001, "1.000000001 s"],
])("formatMoment of %d ns is %s", (ns, text) => expect(formatMoment(ns)).toBe(text));

test("formatQuantity of bytes uses powers of 1024, of other units none", () => {
  expect(formatQuantity(3 * 1024 ** 3, "bytes")).toBe("3 GiB");
  expect(formatQuantity(1000, "bytes")).toBe("1000 B");
  expect(formatQuantity(12.5, "%")).toBe("12.5 %");
  expect(formatQuantity(12, "")).toBe("12");
});

test("visibleText of hidden characters shows each of them", () => {
  expect(visibleText("a\0b\nc\x7f")).toBe("a␀b␊c␡");
  expect(visibleText("a\u2028b\u202ec")).toBe("a\\u2028b\\u202ec");
  expect(visibleText("\ud800x")).toBe("\ufffdx");
  expect(visibleText('</script><img onerror="x">')).toBe('</script><img onerror="x">');
});

test("compareValues puts texts in the order of the numbers in them", () => {
  const names = ["GPT.h.10", "GPT.h.2.mlp", "GPT.h.2", "GPT", "gpt"];
  expect([...names].sort(compareValues)).toEqual(["gpt", "GPT", "GPT.h.2", "GPT.h.2.mlp", "GPT.h.10"]);
  expect([3, 20, 1].sort(compareValues)).toEqual([1, 3, 20]);
});

test("plural of one and many adds an s to many", () => {
  expect([plural(1, "span"), plural(2000, "span")]).toEqual(["1 span", "2,000 spans"]);
  expect(plural(2, "backward pass", "backward passes")).toBe("2 backward passes");
});

test("shortenFromLeft of a text keeps its end, and no half of a character", () => {
  expect([shortenFromLeft("GPT.h.0", 7), shortenFromLeft("GPT.h.0", 6)]).toEqual(["GPT.h.0", "…T.h.0"]);
  expect(shortenFromLeft("ab😀c", 3)).toBe("…c");
});
