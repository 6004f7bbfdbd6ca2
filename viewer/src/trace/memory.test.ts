import { expect, test } from "vitest";

import { makeTrace } from "../testing/make-trace";
import { isMemory, maximumOf, peakOf, sampleAt, spanMemory } from "./memory";

const counter = (name: string, samples: readonly (readonly [number, number])[], process = 0) => ({
  name,
  unit: "bytes",
  process,
  time: Float64Array.from(samples, ([time]) => time),
  value: Float64Array.from(samples, ([, value]) => value),
});
const HELD = counter("allocated", [
  [10, 100],
  [20, 140],
  [20, 130],
  [40, 170],
  [50, 90],
]);

test("sampleAt is the last of the samples up to a moment", () => {
  expect([9, 10, 19, 20, 60].map((moment) => sampleAt(HELD, moment))).toEqual([-1, 0, 0, 2, 4]);
});

test("peakOf is the first of the highest samples", () => {
  expect([peakOf(HELD), maximumOf(HELD)]).toEqual([3, 170]);
  expect([peakOf(counter("RSS", [])), maximumOf(counter("RSS", []))]).toEqual([-1, 0]);
  expect([HELD, counter("cuda allocated", []), counter("process RSS", [])].map(isMemory)).toEqual([true, true, false]);
});

test("spanMemory is what was held at the end, or the most inside, less what was held at the begin", () => {
  const trace = makeTrace(
    [
      { time: [5, 30], name: "early" },
      { time: [10, 55], name: "net" },
      { time: [15, 30], name: "a" },
      { time: [45, 50], name: "b" },
      { time: [46, 50], name: "cut", complete: 0 },
      { time: [46, 50], name: "kernel", track: 1 },
    ],
    ["forward", "gpu"],
    { counters: [HELD] },
  );
  expect([...spanMemory(trace, "retained")]).toEqual([NaN, -10, 30, -80, NaN, NaN]);
  expect([...spanMemory(trace, "peak")]).toEqual([NaN, 70, 40, 0, NaN, NaN]);
});

test("spanMemory of a process that allocates on a GPU is of that, and of its own process", () => {
  const onGpu = counter("cuda allocated", [
    [0, 1],
    [5, 9],
  ]);
  const trace = makeTrace([{ time: [1, 10], name: "net" }], ["forward"], {
    counters: [{ ...HELD, process: 1 }, counter("allocated", [[0, 1000]]), onGpu],
  });
  expect([...spanMemory(trace, "retained")]).toEqual([8]);
});
