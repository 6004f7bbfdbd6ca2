import { expect, test } from "vitest";

import { niceStep, ticks } from "./ticks";

test("niceStep of any length is 1, 2 or 5 times a power of ten", () => {
  expect([0.2, 1, 1.5, 3, 7, 30, 1001].map(niceStep)).toEqual([1, 1, 2, 5, 10, 50, 2000]);
});

test("ticks have the unit of the viewport's far end", () => {
  expect(ticks({ start: 0, end: 4e6 }, 400, 100)).toEqual([
    { time: 0, label: "0" },
    { time: 1e6, label: "1 ms" },
    { time: 2e6, label: "2 ms" },
    { time: 3e6, label: "3 ms" },
    { time: 4e6, label: "4 ms" },
  ]);
});

test("ticks of a narrow viewport far from 0 have the digits that tell them apart", () => {
  const labels = ticks({ start: 2_000_000_100, end: 2_000_000_500 }, 400, 100).map((tick) => tick.label);
  expect(labels).toEqual(["2.0000001 s", "2.0000002 s", "2.0000003 s", "2.0000004 s", "2.0000005 s"]);
});

test("ticks before 0 have negative labels", () => {
  expect(ticks({ start: -200, end: 100 }, 300, 100).map((tick) => tick.label)).toEqual([
    "-200 ns",
    "-100 ns",
    "0",
    "100 ns",
  ]);
});
