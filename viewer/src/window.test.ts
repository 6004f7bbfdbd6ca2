import { expect, test } from "vitest";

import { around, clamp, length, pan, reveal, zoom } from "./window";

const bounds = { start: 0, end: 1000 };

test("zoom keeps the time under the pointer", () => {
  expect(zoom({ start: 100, end: 300 }, 0.5, 150, bounds)).toEqual({ start: 125, end: 225 });
  expect(zoom({ start: 125, end: 225 }, 2, 150, bounds)).toEqual({ start: 100, end: 300 });
});

test("zoom ends at 20 ns and at a little more than all", () => {
  expect(length(zoom({ start: 100, end: 130 }, 0.001, 110, bounds))).toBe(20);
  expect(length(zoom({ start: 0, end: 900 }, 50, 110, bounds))).toBeCloseTo(1100);
});

test("pan moves by a part of the window and leaves half of it over the trace", () => {
  expect(pan({ start: 100, end: 300 }, 0.5, bounds)).toEqual({ start: 200, end: 400 });
  expect(pan({ start: 100, end: 300 }, -9, bounds)).toEqual({ start: -100, end: 100 });
  expect(pan({ start: 100, end: 300 }, 99, bounds)).toEqual({ start: 900, end: 1100 });
});

test("a trace of a nanosecond can be shown", () => {
  const window = around({ start: 0, end: 1 }, { start: 0, end: 1 });
  expect(window.start).toBeLessThanOrEqual(0);
  expect(window.end).toBeGreaterThanOrEqual(1);
});

test("around leaves a margin", () => {
  expect(around({ start: 100, end: 600 }, bounds)).toEqual({ start: 90, end: 610 });
});

test("clamp is idempotent", () => {
  const once = clamp({ start: -5000, end: 9000 }, bounds);
  expect(clamp(once, bounds)).toEqual(once);
});

test("reveal leaves a window that shows the stretch", () => {
  const window = { start: 100, end: 300 };
  expect(reveal(window, { start: 150, end: 160 }, bounds)).toBe(window);
});

test("reveal centres what is out of sight", () => {
  expect(reveal({ start: 100, end: 300 }, { start: 500, end: 520 }, bounds)).toEqual({ start: 410, end: 610 });
});

test("reveal zooms to what would be too thin or too wide", () => {
  const big = { start: 0, end: 1e9 };
  const thin = reveal(big, { start: 500, end: 700 }, big);
  expect(length(thin)).toBeLessThan(5000);
  const wide = reveal({ start: 0, end: 10 }, { start: 100, end: 900 }, bounds);
  expect(wide.start).toBeLessThanOrEqual(100);
  expect(wide.end).toBeGreaterThanOrEqual(900);
});
