import { expect, test } from "vitest";

import { colors, hash, luminance } from "./color";

const MANY = Array.from({ length: 200 }, (_, i) => `Class${i}`);

test("hash and colour stay what they are: traces of other versions are compared by eye", () => {
  expect(hash("GPT2Block")).toBe(3973892814);
  expect(colors(["GPT2Block"]).get("GPT2Block")).toEqual({ fill: "#0095c1", ink: "#000000" });
});

test("a class has the same colour whatever the order, and what else there is", () => {
  const some = colors(["Linear", "GELU"]);
  expect(colors(["GELU", "Linear", "Linear"])).toEqual(some);
  expect(colors(["Linear"]).get("Linear")).toEqual(colors(["Linear", "AdaptiveAvgPool2d"]).get("Linear"));
});

test("as many classes as there are slots differ", () => {
  const fills = [...colors(MANY.slice(0, 48)).values()].map((color) => color.fill);
  expect(new Set(fills).size).toBe(48);
});

test("more classes than slots still all have one", () => {
  expect(colors(MANY).size).toBe(200);
});

test("ink reads on every fill: a contrast of 4.5 or more", () => {
  for (const { fill, ink } of colors(MANY).values()) {
    const [light, dark] = [luminance(fill), luminance(ink)].sort((a, b) => b - a);
    expect((light + 0.05) / (dark + 0.05)).toBeGreaterThanOrEqual(4.5);
  }
});

test("luminance of the ends and of pure red", () => {
  expect(luminance("#ffffff")).toBeCloseTo(1);
  expect(luminance("#000000")).toBe(0);
  expect(luminance("#ff0000")).toBeCloseTo(0.2126);
});
