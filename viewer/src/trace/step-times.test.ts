import { expect, test } from "vitest";

import { makeTrace } from "../testing/make-trace";
import { stepTimesOf } from "./step-times";
import { stepsOf } from "./steps";

/*
 * step 0   forward 0…20, backward 30…60 with a recompute 40…45, on another thread forward 50…70; mark 80
 * step 1   nothing before 90, forward 90…95, the backward pass itself and a kernel count for nothing; mark 120
 */
const trace = makeTrace(
  [
    { time: [0, 20], name: "net" },
    { time: [5, 15], name: "net.a", parent: 0 },
    { time: [30, 60], name: "net", phase: 1, track: 1 },
    { time: [40, 45], name: "net.a", phase: 2, track: 1, parent: 2 },
    { time: [50, 70], name: "net", track: 2 },
    { time: [85, 119], name: "backward()", phase: 1, track: 3 },
    { time: [86, 118], name: "net", track: 4 },
    { time: [90, 95], name: "net" },
  ],
  ["forward", "backward", "forward", "backward pass", "gpu"],
  {
    marks: [
      { time: 80, kind: "step", text: "step 0" },
      { time: 120, kind: "step", text: "step 1" },
    ],
  },
);

test("stepTimesOf steps counts each moment once and adds up to each step", () => {
  const [first, second] = stepTimesOf(trace, stepsOf(trace));
  // Forward on the other thread counts only from 60 to 70: before that a backward ran.
  expect(first).toEqual({ forward: 30, backward: 25, recompute: 5, before: 0, between: 10, after: 10 });
  expect(second).toEqual({ forward: 5, backward: 0, recompute: 0, before: 10, between: 0, after: 25 });
});

test("stepTimesOf steps of several processes are of the first one's spans", () => {
  const processes = [0, 1].map((rank) => ({ pid: rank, rank, name: `rank ${rank}` }));
  const tracks = [...trace.tracks.map((track, i) => (i === 2 ? { ...track, process: 1 } : track))];
  const ranks = { ...trace, processes, tracks };
  const [first, second] = stepTimesOf(ranks, stepsOf(ranks));
  // Without the forward from 50 to 70, which is on the other rank now.
  expect(first).toEqual({ forward: 20, backward: 25, recompute: 5, before: 0, between: 10, after: 20 });
  expect(second).toEqual({ forward: 5, backward: 0, recompute: 0, before: 10, between: 0, after: 25 });
});

test("stepTimesOf a step without spans is all before", () => {
  const [empty] = stepTimesOf(trace, [{ start: 200, end: 230, name: "step 2", isWhole: true }]);
  expect(empty).toEqual({ forward: 0, backward: 0, recompute: 0, before: 30, between: 0, after: 0 });
});
