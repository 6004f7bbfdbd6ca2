import { expect, test } from "vitest";

import { formatDuration, formatMoment, formatQuantity, plural, visibleText } from "./format";

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

test("plural of one and many adds an s to many", () => {
  expect([plural(1, "span"), plural(2000, "span")]).toEqual(["1 span", "2,000 spans"]);
});
