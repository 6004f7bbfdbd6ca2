import { expect, test } from "vitest";
import { makeTrace } from "../testing/make-trace";
import { stepsOf } from "../trace/steps";
import { compareSteps } from "./compare-steps";

/*
 * step 0   0 net ........ 100          GPU 20 net 40        mark 110
 *            10 a 30  40 b 60
 * step 1  110 net ............. 250    GPU 130 net 180      mark 260
 *           120 a 140  150 c 160
 *              backward 200 a 240
 */
const trace = makeTrace(
  [
    { time: [0, 100], name: "net" },
    { time: [10, 30], name: "a: A/net.a/A", parent: 0, link: 1 },
    { time: [20, 40], name: "net", track: 2 },
    { time: [40, 60], name: "b: B/net.b/B", parent: 0 },
    { time: [110, 250], name: "net", step: 1 },
    { time: [120, 140], name: "a: A/net.a/A", parent: 4, step: 1, link: 1 },
    { time: [130, 180], name: "net", track: 2, step: 1 },
    { time: [150, 160], name: "c: C/net.c/C", parent: 4, step: 1 },
    { time: [200, 240], name: "a: A/net.a/A", phase: 1, track: 1, step: 1 },
  ],
  ["forward", "backward", "gpu", "forward"],
  {
    marks: [
      { time: 110, kind: "step", text: "step 0" },
      { time: 260, kind: "step", text: "step 1" },
    ],
    counters: [
      {
        name: "RSS",
        unit: "bytes",
        process: 0,
        time: Float64Array.of(5, 90, 150, 300),
        value: Float64Array.of(1, 2, 3, 4),
      },
    ],
    spanArgs: { 5: { shapes: "f32[2]" } },
  },
);
const [first, second] = stepsOf(trace);
const both = compareSteps(trace, [first, second]);

test("compareSteps puts each step into processes of its own, on one time axis", () => {
  const { spans } = both;
  const rows = [...spans.start.keys()].map((i) => [
    both.processes[both.tracks[spans.track[i]].process].name,
    both.tracks[spans.track[i]].kind,
    both.names[spans.name[i]].label,
    spans.start[i],
    spans.end[i],
    spans.parent[i],
    spans.depth[i],
  ]);
  const [one, two] = ["step 0 · rank 0 · python", "step 1 · rank 0 · python"];
  expect(rows).toEqual([
    [one, "forward", "net", 0, 100, -1, 0],
    [two, "forward", "net", 0, 140, -1, 0],
    [one, "forward", "a: A", 10, 30, 0, 1],
    [two, "forward", "a: A", 10, 30, 1, 1],
    [one, "gpu", "net", 20, 40, -1, 0],
    [two, "gpu", "net", 20, 70, -1, 0],
    [one, "forward", "b: B", 40, 60, 0, 1],
    [two, "forward", "c: C", 40, 50, 1, 1],
    [two, "backward", "a: A", 90, 130, -1, 0],
  ]);
  expect(both.tracks.map(({ kind, process }) => `${kind} ${process}`)).toEqual([
    "forward 0",
    "forward 1",
    "backward 0",
    "backward 1",
    "gpu 0",
    "gpu 1",
  ]);
  expect(spans.link[2]).not.toBe(spans.link[3]);
  expect(both.spanArgs).toEqual({ 3: { shapes: "f32[2]" } });
  expect(both.marks.map(({ time, kind, text }) => [time, kind, text])).toEqual([
    [110, "mark", "end of step 0"],
    [150, "mark", "end of step 1"],
  ]);
  expect(both.counters.map(({ process, time, value }) => [process, [...time], [...value]])).toEqual([
    [0, [5, 90], [1, 2]],
    [1, [0, 40], [2, 3]],
  ]);
});

test("compareSteps says per module and phase what differs in self time", () => {
  const { changes, ofSpan, titles, notes } = both.comparison!;
  expect(
    changes.map(({ fqn, phase, before, after, callsBefore, callsAfter, verdict }) => [
      `${fqn} ${phase}`,
      before,
      after,
      `${callsBefore} → ${callsAfter}`,
      verdict,
    ]),
  ).toEqual([
    ["net forward", 60, 110, "1 → 1", "longer"],
    ["net.a backward", 0, 40, "0 → 1", "added"],
    ["net GPU forward", 20, 50, "1 → 1", "longer"],
    ["net.b forward", 20, 0, "1 → 0", "removed"],
    ["net.c forward", 0, 10, "0 → 1", "added"],
    ["net.a forward", 20, 20, "1 → 1", "same"],
  ]);
  expect([...ofSpan]).toEqual([0, 0, 5, 5, 2, 2, 3, 4, 1]);
  expect(titles).toEqual(["step 0", "step 1"]);
  expect(notes[0]).toBe("step 0 took 110 ns, step 1 150 ns: 40 ns (36.4 %) more.");
  // The first step's mark is at 110, 10 after its last span. The second step's mark is 10 after forward, which contains
  // all 40 of backward.
  expect(notes[1]).toMatch(
    /^Of that forward 100 ns → 100 ns, backward 0 ns → 40 ns, after 10 ns → 10 ns\. Before, between and after are outside/,
  );
});

test("compareSteps leaves whole backward passes out of the self times", () => {
  const withPass = makeTrace(
    [
      { time: [0, 10], name: "net" },
      { time: [20, 60], name: "backward()", phase: 1, track: 1 },
      { time: [110, 120], name: "net", step: 1 },
      { time: [130, 290], name: "backward()", phase: 1, track: 1, step: 1 },
    ],
    ["forward", "backward pass"],
    { marks: trace.marks.map((mark, i) => ({ ...mark, time: [100, 300][i] })) },
  );
  const [zero, one] = stepsOf(withPass);
  const { changes, ofSpan, notes } = compareSteps(withPass, [zero, one]).comparison!;
  expect(changes.map(({ fqn, phase }) => `${fqn} ${phase}`)).toEqual(["net forward"]);
  expect([...ofSpan]).toEqual([0, 0, -1, -1]);
  expect(notes[1]).toMatch(/^Of that forward 10 ns → 10 ns, before 0 ns → 10 ns, after 90 ns → 180 ns\./);
});

test("compareSteps of several processes compares the spans and counters of the one whose steps they are", () => {
  const processes = [0, 1].map((rank) => ({ pid: rank, rank, name: `rank ${rank}` }));
  const tracks = trace.tracks.map((track, i) => (i === 0 ? track : { ...track, process: 1 }));
  const counters = [...trace.counters, { ...trace.counters[0], process: 1 }];
  const ranks = { ...trace, processes, tracks, counters };
  const compared = compareSteps(ranks, [first, second]);
  expect(compared.processes.map(({ name }) => name)).toEqual(["step 0 · rank 0", "step 1 · rank 0"]);
  expect(compared.tracks.map(({ kind, process }) => `${kind} ${process}`)).toEqual(["forward 0", "forward 1"]);
  expect(compared.counters.map(({ process }) => process)).toEqual([0, 1]);
  expect(compared.comparison!.changes.map(({ fqn, phase, before, after }) => [fqn, phase, before, after])).toEqual([
    ["net", "forward", 60, 110],
    ["net.b", "forward", 20, 0],
    ["net.c", "forward", 0, 10],
    ["net.a", "forward", 20, 20],
  ]);
  expect(compared.comparison!.notes[1]).toMatch(/^Of that forward 100 ns → 140 ns, after 10 ns → 10 ns\./);
});

test("compareSteps of a step with itself finds all the same", () => {
  const { changes, notes } = compareSteps(trace, [first, first]).comparison!;
  expect(new Set(changes.map(({ verdict }) => verdict))).toEqual(new Set(["same"]));
  expect(notes[0]).toBe("step 0 took 110 ns, step 0 110 ns: just as long.");
});
