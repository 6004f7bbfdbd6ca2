import { expect, test } from "vitest";
import { makeTrace } from "../testing/make-trace";
import type { Track } from "../trace/trace";
import { layoutRows, levelTop, metricsFor, rowAt, rowsByProcess, rowsHeight } from "./rows";

const metrics = metricsFor(16);
const track = (kind: string, thread: string, tid: number, process = 0): Track => ({
  kind,
  thread,
  tid,
  process,
  name: `${kind} · ${thread}`,
});
const trace = makeTrace([], [], {
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
const rows = (folded: string[] = []) => layoutRows(trace, depths, new Set(folded), metrics);

test("layoutRows puts what tensors hold above the tracks of its process", () => {
  const counters = ["RSS", "allocated"].map((name) => ({ ...trace.counters[0], name }));
  const titles = layoutRows({ ...trace, counters }, depths, new Set(), metrics).map((row) => row.title);
  expect(titles.slice(0, 3)).toEqual(["rank 0", "allocated", "forward · main"]);
  expect(titles.indexOf("RSS")).toBe(6);
});

test("layoutRows of a process puts forward above backward per thread, then GPUs, then counters", () => {
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

test("layoutRows stacks rows that are as tall as their levels", () => {
  const all = rows();
  for (let i = 1; i < all.length; i++) expect(all[i].top).toBe(all[i - 1].top + all[i - 1].height);
  expect(all[1].height).toBe(3 * metrics.level + metrics.gap);
  // A track without spans still has a readable label.
  expect(all[3].height).toBe(metrics.level + metrics.gap);
});

test("layoutRows with folded keys leaves a track one level and a process its header", () => {
  expect(rows(["track 2"])[1]).toMatchObject({ depths: 1, folded: true, height: metrics.level + metrics.gap });
  expect(rows(["process 0"]).map((row) => row.title)).toEqual(["rank 0", "rank 1", "forward · main"]);
});

test("rowAt a height finds the row that covers it", () => {
  const all = rows();
  expect(rowAt(all, 0)?.title).toBe("rank 0");
  expect(rowAt(all, all[2].top)?.title).toBe("backward · main");
  expect(rowAt(all, 1e6)).toBeUndefined();
});

test("levelTop of a level that is folded away is the top of its row", () => {
  const [, row] = rows(["track 2"]);
  expect(levelTop(row, 2, metrics)).toBe(levelTop(row, 0, metrics));
  expect(levelTop(rows()[1], 2, metrics) - levelTop(rows()[1], 0, metrics)).toBe(2 * metrics.level);
});

test("metricsFor larger text gives larger rows", () => {
  expect(metricsFor(32).level).toBe(2 * metricsFor(16).level);
});

test("rowsByProcess gives each header with what is below it, and rowsHeight where they end", () => {
  const groups = rowsByProcess(rows(["process 1"]));
  expect(groups.map((group) => group.map((row) => row.key))).toEqual([
    ["process 0", "track 2", "track 1", "track 3", "track 0", "counter 0"],
    ["process 1"],
  ]);
  expect(groups.map(rowsHeight)).toEqual([groups[1][0].top, groups[1][0].top + metrics.header]);
  expect(rowsHeight([])).toBe(0);
});
