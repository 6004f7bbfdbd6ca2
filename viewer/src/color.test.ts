import { expect, test } from "vitest";

import {
  assignColors,
  colorKey,
  GIVEN_HUE,
  hash,
  luminance,
  NOTHING,
  partColor,
  shades,
  TAKEN_HUE,
  UNKNOWN,
} from "./color";

const MANY = Array.from({ length: 200 }, (_, i) => `Class${i}`);

test("hash of a class never changes and gives the same colour in every version", () => {
  expect(hash("GPT2Block")).toBe(3973892814);
  expect(assignColors(["GPT2Block"]).get("GPT2Block")).toEqual({ fill: "#aca7ff", ink: "#000000" });
});

test("assignColors beside any other classes gives a class the same colour", () => {
  const all = assignColors(MANY);
  expect(all.size).toBe(200);
  for (const moduleClass of MANY) {
    expect(assignColors([moduleClass]).get(moduleClass)).toEqual(all.get(moduleClass));
  }
});

test("assignColors of the classes of torch and transformers gives each its own", () => {
  const classes =
    "Linear Conv1d Conv2d LayerNorm RMSNorm BatchNorm2d GroupNorm Embedding Dropout ReLU GELU SiLU Identity";
  const more = "MultiheadAttention ModuleList Sequential Conv1D NewGELUActivation GPT2Block GPT2MLP GPT2Attention";
  const llama = "LlamaModel LlamaDecoderLayer LlamaAttention LlamaMLP LlamaRMSNorm LlamaRotaryEmbedding";
  const names = `${classes} ${more} ${llama}`.split(" ");
  expect(new Set([...assignColors(names).values()].map(({ fill }) => fill)).size).toBe(names.length);
});

test("ink on every fill has a contrast of 4.5 or more", () => {
  const costs = [...shades(TAKEN_HUE, 10), ...shades(GIVEN_HUE, 10), NOTHING, UNKNOWN];
  for (const { fill, ink } of [...assignColors(MANY).values(), ...costs]) {
    const [light, dark] = [luminance(fill), luminance(ink)].sort((a, b) => b - a);
    expect((light + 0.05) / (dark + 0.05)).toBeGreaterThanOrEqual(4.5);
  }
});

test("shades of one hue are each darker than the one before", () => {
  for (const hue of [TAKEN_HUE, GIVEN_HUE]) {
    const light = shades(hue, 10).map(({ fill }) => luminance(fill));
    expect(light).toEqual([...new Set(light)].sort((a, b) => b - a));
    expect(light.length).toBe(10);
  }
});

test("luminance of white, black and pure red is as WCAG defines it", () => {
  expect(luminance("#ffffff")).toBeCloseTo(1);
  expect(luminance("#000000")).toBe(0);
  expect(luminance("#ff0000")).toBeCloseTo(0.2126);
});

test("a range has the colour of its category, one of the user's that of its name", () => {
  const loading = { label: "enumerate(DataLoader)", moduleClass: "range · data loading" };
  const own = [
    { label: "rollout", moduleClass: "range · user" },
    { label: "reward", moduleClass: "range · user" },
  ];
  const colors = assignColors([loading, ...own].map(colorKey));
  expect(colors.get(colorKey(loading))).toEqual(partColor("data loading"));
  expect(own.map((name) => colors.get(colorKey(name)))).toEqual([partColor("rollout"), partColor("reward")]);
  expect(partColor("rollout")).not.toEqual(partColor("reward"));
});
