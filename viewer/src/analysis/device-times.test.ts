import { expect, test } from "vitest";

import { makeTrace } from "../testing/make-trace";
import { stepsOf } from "../trace/steps";
import { hasDeviceTimes } from "../trace/trace";
import { deviceTimes, stepDeviceTimes } from "./device-times";
import { computeTotals, groupsOf } from "./totals";

/*
 * time       0   10   20   30   40   50   60   70   80   90  100
 * forward    |net .| |net |           |net                |net    0, 3, 6, 10; in the first a: 1
 * gpu 1           |net ......|  |net .......|                     2, 5; in the first a: 4
 * gpu 2                                 |net: backward ....|      7; in it a recompute of net: 8, with a in it: 9
 * marks                  |25                       |75
 */
const trace = makeTrace(
  [
    { time: [0, 12], name: "net/net/Net" },
    { time: [2, 8], name: "a/net.a/A", parent: 0 },
    { time: [13, 35], name: "net/net/Net", track: 1 },
    { time: [14, 20], name: "net/net/Net", call: 1 },
    { time: [15, 30], name: "a/net.a/A", track: 1, parent: 2 },
    { time: [40, 60], name: "net/net/Net", track: 1, call: 1 },
    { time: [50, 52], name: "net/net/Net", call: 3 },
    { time: [55, 90], name: "net/net/Net", track: 2, phase: 1, call: 1 },
    { time: [60, 80], name: "net/net/Net", track: 2, phase: 2, call: 1, parent: 7 },
    { time: [62, 70], name: "a/net.a/A", track: 2, phase: 2, call: 1, parent: 8 },
    { time: [92, 93], name: "net/net/Net", call: 2 },
  ],
  ["forward", "gpu", "gpu"],
  {
    marks: [
      { time: 25, kind: "step", text: "step 0" },
      { time: 75, kind: "step", text: "step 1" },
    ],
    metadata: { device_clock_bound_ns: 5 },
  },
);
const groups = groupsOf(trace, "module");
const byTitle = (times: ReturnType<typeof deviceTimes>) =>
  Object.fromEntries([...times].map(([group, time]) => [groups.groups[group].title, time]));

test("deviceTimes of a recording are per module, a part of the streams' time, and how late streams come", () => {
  // Streams: 13 to 60 and 55 to 90. Net: 22 + 20 forward, 15 backward, 20 recompute; it started 13 and 26 late, a 13.
  expect(byTitle(deviceTimes(trace, groups, null))).toEqual({
    net: { gpu: 77, share: 77 / 82, latency: 19 },
    "net.a": { gpu: 23, share: 23 / 82, latency: 13 },
  });
});

test("deviceTimes of a range are cut at its ends, and of the calls that begin in it", () => {
  // Streams: 20 to 50.
  expect(byTitle(deviceTimes(trace, groups, { start: 20, end: 50 }))).toEqual({
    net: { gpu: 25, share: 25 / 30, latency: 26 },
    "net.a": { gpu: 10, share: 10 / 30, latency: 0 },
  });
});

test("computeTotals of device times count recompute from event to event, with what is inside", () => {
  const [net] = computeTotals(trace, groups, "gpu", null);
  expect(net).toMatchObject({ title: "net", forward: 42, backward: 15, recompute: 20, total: 77, self: 54 });
});

test("kernels of a profile are no device times", () => {
  expect(hasDeviceTimes(trace)).toBe(true);
  expect(hasDeviceTimes({ ...trace, metadata: {} })).toBe(false);
  expect(hasDeviceTimes({ ...trace, tracks: trace.tracks.slice(0, 1) })).toBe(false);
});

test("stepDeviceTimes are a part of each step, and the longest gap in it", () => {
  // 0 to 25: busy from 13; 25 to 75: busy except from 35 to 40; 75 to 93: busy until 90.
  expect(stepDeviceTimes(trace, stepsOf(trace))).toEqual([
    { busy: 12 / 25, gap: 13 },
    { busy: 45 / 50, gap: 5 },
    { busy: 15 / 18, gap: 3 },
  ]);
});
