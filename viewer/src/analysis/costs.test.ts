import { expect, test } from "vitest";

import { makeTrace } from "../testing/make-trace";
import { costsOf, formatCost, hasFlops, SHADES, shadeOf } from "./costs";
import { describeHolders } from "./describe";

const SPANS = [
  { time: [0, 10], name: "net" },
  { time: [2, 6], name: "net", track: 2 },
  { time: [20, 30], name: "net", track: 1, phase: 1 },
  { time: [40, 50], name: "net", track: 1, phase: 1 },
  { time: [60, 70], name: "net", call: 1 },
  { time: [80, 90], name: "net", call: 2 },
] as const;
const ARGS = { 0: { flops: "40" }, 2: { flops: "60" }, 4: { flops: "unknown" } };
const kinds = ["forward", "backward", "gpu"];

test("FLOP/s are those of a call and phase by the time of all its spans on threads", () => {
  const trace = makeTrace(SPANS, kinds, { spanArgs: ARGS, metadata: { flops: { dtypes: { "cpu float32": 100 } } } });
  // The spans of backward have 60 FLOPs in 20 ns; the kernel belongs to the forward.
  expect([...costsOf(trace, "flops")]).toEqual([4e9, 4e9, 3e9, 3e9, NaN, NaN]);
  expect([hasFlops(trace), hasFlops(makeTrace(SPANS, kinds))]).toEqual([true, false]);
  expect(hasFlops(makeTrace(SPANS, kinds, { spanArgs: ARGS }))).toBe(false);
});

test("FLOP/s on a device are by the time of its streams", () => {
  const dtypes = { "NVIDIA H100 bfloat16": 100 };
  // In a comparison each side has its own dtypes.
  for (const key of ["flops", "flops after"]) {
    const trace = makeTrace(SPANS, kinds, { spanArgs: ARGS, metadata: { [key]: { dtypes } } });
    expect([...costsOf(trace, "flops")]).toEqual([10e9, 10e9, NaN, NaN, NaN, NaN]);
  }
});

test("FLOP/s of a backward are by its time without what was recomputed meanwhile", () => {
  const rows = [
    { time: [0, 100], name: "net", phase: 1 },
    { time: [10, 90], name: "block", phase: 1, parent: 0 },
    { time: [20, 60], name: "block", phase: 2, parent: 1 },
    { time: [25, 50], name: "linear", phase: 2, parent: 2 },
  ] as const;
  const spanArgs = { 0: { flops: "120" }, 1: { flops: "80" }, 2: { flops: "40" }, 3: { flops: "25" } };
  const trace = makeTrace(rows, ["backward"], { spanArgs, metadata: { flops: { dtypes: { "cpu float32": 160 } } } });
  expect([...costsOf(trace, "flops")]).toEqual([2e9, 2e9, 1e9, 1e9]);
});

test("shadeOf memory is one for each doubling, of FLOP/s one for each tenth", () => {
  const shades = [1024, 513, 512, 256, 1, 0, -1024, -512].map((value) => shadeOf("retained", value, 1024));
  expect(shades).toEqual([SHADES, SHADES, 9, 8, 1, 0, -SHADES, -9]);
  expect([100, 51, 50, 1].map((value) => shadeOf("flops", value, 100))).toEqual([10, 6, 5, 1]);
});

test("formatCost says bytes, rates, and what is not known", () => {
  expect([formatCost("peak", 2048), formatCost("flops", 1.5e9), formatCost("flops", Number.NaN)]).toEqual([
    "2 KiB",
    "1.5 GFLOP/s",
    "unknown",
  ]);
});

test("describeHolders lists ten, then the sum of more, and what is other last", () => {
  const rows = Array.from({ length: 13 }, (_, i): [string, number] => [`h.${i}`, 100 - i]);
  const trace = makeTrace([], [], { holders: { time: 0, rows: [...rows, ["other", 5]] } });
  const said = describeHolders(trace);
  expect(said.length).toBe(12);
  expect([said[0], ...said.slice(9)]).toEqual([
    { name: "h.0", value: "100 B" },
    { name: "h.9", value: "91 B" },
    { name: "more modules", value: "267 B" },
    { name: "other", value: "5 B" },
  ]);
  const few = makeTrace([], [], { holders: { time: 0, rows: [["other", 5]] } });
  expect(describeHolders(few)).toEqual([{ name: "other", value: "5 B" }]);
});
