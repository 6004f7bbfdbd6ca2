import { describe, expect, it } from "vitest";

import { barOfStep, barPitch, barsOf, fullHeightNs } from "./step-bars";

describe("bars of steps", () => {
  it("are one per step where there is room", () => {
    expect(barsOf([5, 6, 7], 100)).toEqual([
      { first: 0, last: 0, slowest: 0 },
      { first: 1, last: 1, slowest: 1 },
      { first: 2, last: 2, slowest: 2 },
    ]);
  });

  it("show several steps where there is not, each its slowest", () => {
    const bars = barsOf([1, 9, 1, 2, 8, 1, 1], 12);
    expect(bars).toEqual([
      { first: 0, last: 1, slowest: 1 },
      { first: 2, last: 3, slowest: 3 },
      { first: 4, last: 6, slowest: 4 },
    ]);
    expect([0, 1, 2, 6].map((step) => barOfStep(bars, step))).toEqual([0, 0, 1, 2]);
  });

  it("hold every one of thousands of steps once", () => {
    const bars = barsOf(new Array(12_345).fill(1), 1000);
    expect(bars.length).toBe(250);
    expect(bars[0].first).toBe(0);
    expect(bars.at(-1)?.last).toBe(12_344);
    expect(bars.slice(1).map(({ first }) => first)).toEqual(bars.slice(0, -1).map(({ last }) => last + 1));
  });

  it("are never wider than a few steps need", () => {
    expect(barPitch(2, 1000)).toBe(40);
    expect(barPitch(100, 1000)).toBe(10);
  });

  it("are as high as the longest step, or as four medians where that is less", () => {
    expect(fullHeightNs([10, 10, 30])).toBe(30);
    expect(fullHeightNs([10, 10, 10, 900])).toBe(40);
    expect(fullHeightNs([])).toBe(0);
  });
});
