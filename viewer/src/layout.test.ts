import { expect, test } from "vitest";

import { laneTop, metricsFor, rowAt, rowsOf } from "./layout";
import { made } from "./made";
import type { Track } from "./trace";

const metrics = metricsFor(16);
const track = (kind: string, thread: string, tid: number, process = 0): Track => ({ kind, thread, tid, process, name: `${kind} · ${thread}` });
const trace = made([], [], {
  processes: [0, 1].map((rank) => ({ pid: rank, rank, name: `rank ${rank}` })),
  tracks: [
    track("gpu", "stream 7", 7),
    track("backward", "main", 1),
    track("forward", "main", 1),
    track("forward", "worker", 2),
    track("forward", "main", 1, 1),
  ],
  counters: [{ name: "RSS", unit: "bytes", process: 0, time: new Float64Array(0), value: new Float64Array(0) }],
});
const depths = [1, 2, 3, 0, 1];
const rows = (folded: string[] = []) => rowsOf(trace, depths, new Set(folded), metrics);

test("per process: forward above backward per thread, then GPU, then counters", () => {
  expect(rows().map((row) => row.title)).toEqual([
    "rank 0",
    "forward · main",
    "backward · main",
    "forward · worker",
    "gpu · stream 7",
    "RSS",
    "rank 1",
    "forward · main",
  ]);
});

test("rows lie one below the other, as tall as their lanes", () => {
  const all = rows();
  all.slice(1).forEach((row, i) => expect(row.top).toBe(all[i].top + all[i].height));
  expect(all[1].height).toBe(3 * metrics.lane + metrics.gap);
  // A track of no slices still has a label to read.
  expect(all[3].height).toBe(metrics.lane + metrics.gap);
});

test("a folded track has one lane, a folded process only its header", () => {
  expect(rows(["track 2"])[1]).toMatchObject({ depths: 1, folded: true, height: metrics.lane + metrics.gap });
  expect(rows(["process 0"]).map((row) => row.title)).toEqual(["rank 0", "rank 1", "forward · main"]);
});

test("the row at a height", () => {
  const all = rows();
  expect(rowAt(all, 0)?.title).toBe("rank 0");
  expect(rowAt(all, all[2].top)?.title).toBe("backward · main");
  expect(rowAt(all, 1e6)).toBeUndefined();
});

test("a lane that is folded away lies at the top of its row", () => {
  const [, row] = rows(["track 2"]);
  expect(laneTop(row, 2, metrics)).toBe(laneTop(row, 0, metrics));
  expect(laneTop(rows()[1], 2, metrics) - laneTop(rows()[1], 0, metrics)).toBe(2 * metrics.lane);
});

test("sizes follow the user's text size", () => {
  expect(metricsFor(32).lane).toBe(2 * metricsFor(16).lane);
});
