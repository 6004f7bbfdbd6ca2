import { gzipSync } from "node:zlib";
import { expect, test } from "vitest";

import { decode, PayloadError, unpack } from "./payload";

function makeHeader() {
  const ref = (type: string, offset: number) => ({ type, offset, length: 1 });
  return {
    version: 1,
    base_ns: "1790000000123456789",
    metadata: { torch: "2.13" },
    stats: { recorded: 2 },
    names: [["h.0: Block", "GPT.h.0", "Block"]],
    processes: [{ pid: 7, rank: 0, name: "rank 0 · python" }],
    tracks: [{ kind: "forward", thread: "MainThread", tid: 7, process: 0, name: "forward · MainThread" }],
    marks: [[50, "step", "step 0"]],
    args: { rows: ref("i32", 16), kind: ref("i32", 16), kinds: [{ shapes: "float32[2, 8]" }] },
    counters: [{ name: "RSS", unit: "bytes", process: 0, time: ref("f64", 0), value: ref("f64", 8) }],
    arrays: {
      start: ref("f64", 0),
      duration: ref("f64", 8),
      name: ref("i32", 16),
      track: ref("i32", 16),
      depth: ref("i32", 16),
      parent: ref("i32", 24),
      call: ref("i32", 32),
      step: ref("i32", 16),
      link: ref("i32", 24),
      phase: ref("u8", 16),
      complete: ref("u8", 40),
    },
  };
}

type Header = ReturnType<typeof makeHeader>;

/** A payload of one span, written byte by byte according to the format. */
function block(change: (header: Header) => void = () => {}): ArrayBuffer {
  const header = makeHeader();
  change(header);
  let text = JSON.stringify(header);
  while ((4 + new TextEncoder().encode(text).length) % 8) text += " ";
  const json = new TextEncoder().encode(text);
  const bytes = new Uint8Array(4 + json.length + 56);
  const view = new DataView(bytes.buffer);
  view.setUint32(0, json.length, true);
  bytes.set(json, 4);
  const body = 4 + json.length;
  view.setFloat64(body, 10, true);
  view.setFloat64(body + 8, 30, true);
  view.setInt32(body + 24, -1, true);
  view.setInt32(body + 32, 3, true);
  view.setUint8(body + 40, 1);
  return bytes.buffer;
}

test("decode of a whole block returns every field", () => {
  const trace = decode(block());
  expect(trace.base).toBe(1790000000123456789n);
  const { spans } = trace;
  expect([spans.count, spans.start[0], spans.end[0], spans.parent[0], spans.call[0], spans.complete[0]]).toEqual([
    1, 10, 40, -1, 3, 1,
  ]);
  expect(trace.names).toEqual([{ label: "h.0: Block", fqn: "GPT.h.0", moduleClass: "Block" }]);
  expect(trace.marks).toEqual([{ time: 50, kind: "step", text: "step 0" }]);
  expect(trace.spanArgs).toEqual({ "0": { shapes: "float32[2, 8]" } });
  expect([...trace.counters[0].time, ...trace.counters[0].value]).toEqual([10, 30]);
});

test("decode of a block has who held memory, with each character visible", () => {
  const holders = {
    time: 5,
    rows: [
      ["GPT\u0007", 64],
      ["other", 2],
    ],
  };
  expect(decode(block((header) => Object.assign(header, { holders }))).holders).toEqual({
    time: 5,
    rows: [
      ["GPT␇", 64],
      ["other", 2],
    ],
  });
  expect(decode(block()).holders).toBeNull();
});

test("unpack undoes base64 and gzip", async () => {
  const packed = Buffer.from(gzipSync(Buffer.from("modtrace"))).toString("base64");
  expect(Buffer.from(await unpack(` ${packed}\n`)).toString()).toBe("modtrace");
});

test("unpack of a page without data says so", async () => {
  await expect(unpack("\n")).rejects.toThrow("holds no timeline");
});

test.each<[string, (header: Header) => void, string]>([
  [
    "a version to come",
    (header) => {
      header.version = 2;
    },
    "format 2",
  ],
  [
    "an array beyond the end",
    (header) => {
      header.arrays.start.length = 1000;
    },
    "cut short",
  ],
  [
    "a type that is none",
    (header) => {
      header.arrays.start.type = "i64";
    },
    "cut short",
  ],
  [
    "a name that is none",
    (header) => {
      header.names = [];
    },
    "span 0 has name 0",
  ],
  [
    "a track that is none",
    (header) => {
      header.tracks = [];
    },
    "span 0 has track 0",
  ],
  [
    "a process that is none",
    (header) => {
      header.processes = [];
    },
    "has no process",
  ],
  [
    "a parent after its child",
    (header) => {
      header.arrays.parent.offset = 16;
    },
    "span 0 has parent 0",
  ],
  [
    "a column of another length",
    (header) => {
      header.arrays.step.length = 0;
    },
    "lacks values of step",
  ],
  [
    "a column that is missing",
    (header) => {
      Reflect.deleteProperty(header.arrays, "link");
    },
    "lacks values of link",
  ],
  [
    "a phase that is none",
    (header) => {
      header.arrays.phase.offset = 32;
    },
    "span 0 has phase 3",
  ],
])("decode of a block with %s refuses it", (_what, change, message) => {
  expect(() => decode(block(change))).toThrow(PayloadError);
  expect(() => decode(block(change))).toThrow(message);
});

test("decode of a block that ends in its header refuses it", () => {
  expect(() => decode(block().slice(0, 100))).toThrow("cut short");
});

/**
 * A block with a comparison, whose one span refers to a change by the integer at an offset: 48 contains 0, 32 contains
 * 3.
 */
const compared = (offset: number, verdict = "slower") =>
  block((header) =>
    Object.assign(header, {
      comparison: {
        titles: ["before", "after"],
        notes: ["one\u0007note"],
        changes: [["GPT.h.0", "forward", 100, 150, 40, 30, 60, 1, 2, verdict]],
        of_span: { type: "i32", offset, length: 1 },
      },
    }),
  );

test("decode of a comparison returns its changes and the change of each span", () => {
  expect(decode(block()).comparison).toBeNull();
  const comparison = decode(compared(48)).comparison!;
  expect([...comparison.ofSpan]).toEqual([0]);
  expect(comparison.notes).toEqual(["one␇note"]);
  expect(comparison.changes).toEqual([
    {
      fqn: "GPT.h.0",
      phase: "forward",
      before: 100,
      after: 150,
      difference: 40,
      interval: [30, 60],
      callsBefore: 1,
      callsAfter: 2,
      verdict: "slower",
    },
  ]);
});

test("decode of a change without an interval has none", () => {
  const bare = block((header) =>
    Object.assign(header, {
      comparison: {
        titles: ["before", "after"],
        notes: [],
        changes: [["GPT.h.0", "recompute", 0, 150, 150, null, null, 0, 0.1, "added"]],
        of_span: { type: "i32", offset: 48, length: 1 },
      },
    }),
  );
  expect(decode(bare).comparison!.changes[0].interval).toBeNull();
});

test("decode of a comparison with a change that is not there or an unknown verdict is refused", () => {
  expect(() => decode(compared(32))).toThrow("a span has a change that is not there");
  expect(() => decode(compared(48, "worse"))).toThrow("unknown verdict");
});

/** A block with one step of 30 ns, all of it in one part. */
const withSteps = (change: (steps: Record<string, unknown>) => void = () => {}) =>
  block((header) => {
    const ref = (type: string, offset: number) => ({ type, offset, length: 1 });
    const steps = {
      parts: [["forward", 0.75]],
      names: ["step\u00073"],
      causes: ["slow: 30\u0007 ns"],
      start: ref("f64", 0),
      duration: ref("f64", 8),
      whole: ref("u8", 40),
      ns: ref("f64", 8),
    };
    change(steps);
    Object.assign(header, { step_parts: steps });
  });

test("decode of steps returns what each was spent on", () => {
  expect(decode(block()).stepParts).toBeNull();
  const parts = decode(withSteps()).stepParts!;
  expect(parts.parts).toEqual([{ name: "forward", share: 0.75 }]);
  expect(parts.steps).toEqual([{ name: "step␇3", start: 10, end: 40, isWhole: true }]);
  expect(parts.causes).toEqual(["slow: 30␇ ns"]);
  expect([...parts.ns]).toEqual([30]);
});

test("decode of steps that lack values is refused", () => {
  const broken = [
    (steps: Record<string, unknown>) => Object.assign(steps, { causes: [] }),
    (steps: Record<string, unknown>) => Object.assign(steps, { names: ["step 3", "step 4"] }),
    (steps: Record<string, unknown>) =>
      Object.assign(steps, {
        parts: [
          ["a", 0.5],
          ["b", 0.5],
        ],
      }),
  ];
  for (const change of broken) expect(() => decode(withSteps(change))).toThrow("its steps lack values");
});
