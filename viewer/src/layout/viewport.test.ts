import { expect, test } from "vitest";

import { clamp, durationOf, overlapOf, pan, reveal, withMargin, zoom } from "./viewport";

const bounds = { start: 0, end: 1000 };

test("zoom at a time keeps it in its place", () => {
  expect(zoom({ start: 100, end: 300 }, 0.5, 150, bounds)).toEqual({ start: 125, end: 225 });
  expect(zoom({ start: 125, end: 225 }, 2, 150, bounds)).toEqual({ start: 100, end: 300 });
});

test("zoom beyond the limits stops at 20 ns and at a little more than the trace", () => {
  expect(durationOf(zoom({ start: 100, end: 130 }, 0.001, 110, bounds))).toBe(20);
  expect(durationOf(zoom({ start: 0, end: 900 }, 50, 110, bounds))).toBeCloseTo(1100);
});

test("pan beyond the trace stops where half of the viewport shows it", () => {
  expect(pan({ start: 100, end: 300 }, 0.5, bounds)).toEqual({ start: 200, end: 400 });
  expect(pan({ start: 100, end: 300 }, -9, bounds)).toEqual({ start: -100, end: 100 });
  expect(pan({ start: 100, end: 300 }, 99, bounds)).toEqual({ start: 900, end: 1100 });
});

test("overlapOf two ranges is what they have in common, if anything", () => {
  expect(overlapOf({ start: -5, end: 10 }, bounds)).toEqual({ start: 0, end: 10 });
  expect(overlapOf({ start: 30, end: 4000 }, bounds)).toEqual({ start: 30, end: 1000 });
  expect(overlapOf({ start: 1e30, end: 1e31 }, bounds)).toBeNull();
});

test("withMargin of a trace of a nanosecond shows it", () => {
  const viewport = withMargin({ start: 0, end: 1 }, { start: 0, end: 1 });
  expect(viewport.start).toBeLessThanOrEqual(0);
  expect(viewport.end).toBeGreaterThanOrEqual(1);
});

test("withMargin of a range adds 2 % on both sides", () => {
  expect(withMargin({ start: 100, end: 600 }, bounds)).toEqual({ start: 90, end: 610 });
});

test("clamp of a clamped viewport changes nothing", () => {
  const once = clamp({ start: -5000, end: 9000 }, bounds);
  expect(clamp(once, bounds)).toEqual(once);
});

test("reveal of a range in sight returns the same viewport", () => {
  const viewport = { start: 100, end: 300 };
  expect(reveal(viewport, { start: 150, end: 160 }, bounds)).toBe(viewport);
});

test("reveal of a range out of sight centres it", () => {
  expect(reveal({ start: 100, end: 300 }, { start: 500, end: 520 }, bounds)).toEqual({ start: 410, end: 610 });
});

test("reveal of a range too thin or too wide zooms to it", () => {
  const big = { start: 0, end: 1e9 };
  const thin = reveal(big, { start: 500, end: 700 }, big);
  expect(durationOf(thin)).toBeLessThan(5000);
  const wide = reveal({ start: 0, end: 10 }, { start: 100, end: 900 }, bounds);
  expect(wide.start).toBeLessThanOrEqual(100);
  expect(wide.end).toBeGreaterThanOrEqual(900);
});
