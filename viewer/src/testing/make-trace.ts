/** Traces for the tests, from rows short enough to check by eye. */
import type { Trace } from "../trace/trace";

export interface SpanRow {
  readonly time: readonly [start: number, end: number];
  /** `label/fqn/class`; a label without slashes is used for all three. */
  readonly name: string;
  readonly parent?: number;
  readonly phase?: number;
  readonly track?: number;
  readonly call?: number;
  readonly step?: number;
  readonly link?: number;
  readonly complete?: number;
}

/** A trace of the rows in one process, with one track per entry of `kinds`; `rest` replaces other fields. */
export function makeTrace(
  rows: readonly SpanRow[],
  kinds: readonly string[] = ["forward"],
  rest: Partial<Trace> = {},
): Trace {
  const titles = [...new Set(rows.map((row) => row.name))];
  const depth: number[] = [];
  for (const row of rows) depth.push(row.parent === undefined ? 0 : depth[row.parent] + 1);
  const column = (cell: (row: SpanRow, i: number) => number) => Int32Array.from(rows, cell);
  return {
    base: 1000n,
    spans: {
      count: rows.length,
      start: Float64Array.from(rows, ({ time }) => time[0]),
      end: Float64Array.from(rows, ({ time }) => time[1]),
      name: column((row) => titles.indexOf(row.name)),
      phase: column(({ phase }) => phase ?? 0),
      track: column(({ track }) => track ?? 0),
      depth: Int32Array.from(depth),
      parent: column((row) => row.parent ?? -1),
      call: column(({ call }) => call ?? 0),
      step: column(({ step }) => step ?? 0),
      link: column(({ link }) => link ?? -1),
      complete: column(({ complete }) => complete ?? 1),
    },
    names: titles.map((title) => {
      const [label, fqn = label, moduleClass = label] = title.split("/");
      return { label, fqn, moduleClass };
    }),
    processes: [{ pid: 1, rank: 0, name: "rank 0 · python" }],
    tracks: kinds.map((kind, i) => ({ kind, thread: "MainThread", tid: 1, process: 0, name: `${kind} ${i}` })),
    marks: [],
    counters: [],
    stats: {},
    metadata: {},
    spanArgs: {},
    comparison: null,
    stepParts: null,
    findings: [],
    findingsEnd: "",
    holders: null,
    ...rest,
  };
}
