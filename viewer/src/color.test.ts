import { expect, test } from "vitest";

import { assignColors, hash, luminance } from "./color";

const MANY = Array.from({ length: 200 }, (_, i) => `Class${i}`);

test("hash of a class never changes and gives the same colour in every version", () => {
  expect(hash("GPT2Block")).toBe(3973892814);
  expect(assignColors(["GPT2Block"]).get("GPT2Block")).toEqual({ fill: "#0095c1", ink: "#000000" });
});

test("assignColors in any order and beside any other class gives a class the same colour", () => {
  const some = assignColors(["Linear", "GELU"]);
  expect(assignColors(["GELU", "Linear", "Linear"])).toEqual(some);
  expect(assignColors(["Linear"]).get("Linear")).toEqual(assignColors(["Linear", "AdaptiveAvgPool2d"]).get("Linear"));
});

test("assignColors with as many classes as colours gives each its own", () => {
  const fills = [...assignColors(MANY.slice(0, 48)).values()].map((color) => color.fill);
  expect(new Set(fills).size).toBe(48);
});

test("assignColors with more classes than colours gives each one", () => {
  expect(assignColors(MANY).size).toBe(200);
});

test("ink on every fill has a contrast of 4.5 or more", () => {
  for (const { fill, ink } of assignColors(MANY).values()) {
    const [light, dark] = [luminance(fill), luminance(ink)].sort((a, b) => b - a);
    expect((light + 0.05) / (dark + 0.05)).toBeGreaterThanOrEqual(4.5);
  }
});

test("luminance of white, black and pure red is as WCAG defines it", () => {
  expect(luminance("#ffffff")).toBeCloseTo(1);
  expect(luminance("#000000")).toBe(0);
  expect(luminance("#ff0000")).toBeCloseTo(0.2126);
});
