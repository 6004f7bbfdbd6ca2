/** From the page's data block to a trace. The block is base64 of gzip of (u32 H, H bytes of JSON, arrays). */
import { visibleText } from "../format";
import { type Comparison, VERDICTS, type Verdict } from "./comparison";
import type { Finding } from "./findings";
import type { Holders } from "./memory";
import type { StepParts } from "./step-parts";
import { type CounterSeries, type IntegerArray, PHASES, type Spans, type Trace } from "./trace";

const FORMAT_VERSION = 1;

/** The page's data is invalid; the message has the reason. */
export class PayloadError extends Error {}

interface ArrayRef {
  readonly type: "f64" | "i32" | "u8";
  readonly offset: number;
  readonly length: number;
}

interface Header {
  readonly version: number;
  readonly base_ns: string;
  readonly metadata: Record<string, unknown>;
  readonly stats: Record<string, number>;
  readonly names: [string, string, string][];
  readonly processes: { pid: number; rank: number | null; name: string }[];
  readonly tracks: { kind: string; thread: string; tid: number; process: number; name: string }[];
  readonly marks: [number, string, string][];
  /** The spans that have args, and for each of them the kind of its args. */
  readonly args: { rows: ArrayRef; kind: ArrayRef; kinds: Record<string, string>[] };
  readonly counters: { name: string; unit: string; process: number; time: ArrayRef; value: ArrayRef }[];
  readonly arrays: Record<string, ArrayRef>;
  readonly comparison?: HeaderComparison;
  readonly findings?: Finding[];
  readonly findings_end?: string;
  readonly step_parts?: HeaderStepParts;
  readonly holders?: Holders;
}

interface HeaderStepParts {
  /** Each part with its share of the time of all steps. */
  readonly parts: [string, number][];
  readonly names: string[];
  readonly causes: (string | null)[];
  readonly start: ArrayRef;
  readonly duration: ArrayRef;
  readonly whole: ArrayRef;
  /** Nanoseconds: all parts of the first step, then all parts of the next, and so on. */
  readonly ns: ArrayRef;
}

interface HeaderComparison {
  readonly titles: [string, string];
  readonly notes: string[];
  /** fqn, phase, ns before and after, the difference and the ends of its interval, calls before and after, verdict. */
  readonly changes: [string, string, number, number, number, number | null, number | null, number, number, Verdict][];
  readonly of_span: ArrayRef;
}

const ARRAY_TYPES = { f64: Float64Array, i32: Int32Array, u8: Uint8Array } as const;

/** Undo base64 and gzip. */
export async function unpack(base64: string): Promise<ArrayBuffer> {
  const text = base64.trim();
  if (!text) throw new PayloadError('This page holds no timeline. Save one with tl.save("x.html").');
  if (typeof DecompressionStream === "undefined") {
    throw new PayloadError("This browser is too old for this page: it cannot decompress the timeline.");
  }
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(plain).arrayBuffer();
}

/** Decode the block. Every index in it is checked, so later code never reads outside an array. */
export function decode(block: ArrayBuffer): Trace {
  const size = new DataView(block).getUint32(0, true);
  const body = 4 + size;
  if (body > block.byteLength) throw new PayloadError("The timeline in this page is cut short.");
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(block, 4, size))) as Header;
  if (header.version !== FORMAT_VERSION) {
    throw new PayloadError(
      `The timeline in this page has format ${header.version}; this page reads ${FORMAT_VERSION}.`,
    );
  }
  const array = (ref: ArrayRef): IntegerArray => {
    const type = ARRAY_TYPES[ref.type];
    if (!type || body + ref.offset + ref.length * type.BYTES_PER_ELEMENT > block.byteLength) {
      throw new PayloadError("The timeline in this page is cut short.");
    }
    return new type(block, body + ref.offset, ref.length);
  };
  const doubles = (ref: ArrayRef): Float64Array => Float64Array.from(array(ref));

  const columns = Object.fromEntries(Object.entries(header.arrays).map(([name, ref]) => [name, array(ref)]));
  const start = columns.start as Float64Array;
  const end = Float64Array.from(start, (time, i) => time + columns.duration[i]);
  const spans = { ...columns, count: start.length, start, end } as unknown as Spans;
  validate(spans, header);

  return {
    base: BigInt(header.base_ns),
    spans,
    names: header.names.map(([label, fqn, moduleClass]) => ({
      label: visibleText(label),
      fqn: visibleText(fqn),
      moduleClass: visibleText(moduleClass),
    })),
    processes: header.processes.map((process) => ({ ...process, name: visibleText(process.name) })),
    tracks: header.tracks.map((track) => ({
      ...track,
      thread: visibleText(track.thread),
      name: visibleText(track.name),
    })),
    marks: header.marks.map(([time, kind, text]) => ({ time, kind, text: visibleText(text) })),
    counters: header.counters.map(
      (counter): CounterSeries => ({
        name: visibleText(counter.name),
        unit: visibleText(counter.unit),
        process: counter.process,
        time: doubles(counter.time),
        value: doubles(counter.value),
      }),
    ),
    stats: header.stats,
    metadata: header.metadata,
    spanArgs: readArgs(array(header.args.rows), array(header.args.kind), header.args.kinds),
    comparison: header.comparison ? readComparison(header.comparison, array(header.comparison.of_span), spans) : null,
    stepParts: header.step_parts ? readStepParts(header.step_parts, doubles) : null,
    findings: (header.findings ?? []).map((found) => ({
      ...found,
      what: visibleText(found.what),
      where: found.where === null ? null : visibleText(found.where),
      part: found.part === null ? null : visibleText(found.part),
      evidence: visibleText(found.evidence),
      next: visibleText(found.next),
    })),
    findingsEnd: visibleText(header.findings_end ?? ""),
    holders: header.holders
      ? { ...header.holders, rows: header.holders.rows.map(([fqn, bytes]) => [visibleText(fqn), bytes]) }
      : null,
  };
}

function readArgs(rows: IntegerArray, kind: IntegerArray, kinds: Record<string, string>[]): Trace["spanArgs"] {
  const shown = kinds.map((args) =>
    Object.fromEntries(Object.entries(args).map(([key, value]) => [visibleText(key), visibleText(String(value))])),
  );
  if (kind.length !== rows.length || kind.some((index) => !shown[index])) {
    throw new PayloadError("The timeline in this page is damaged: args that it refers to are missing.");
  }
  return Object.fromEntries(Array.from(rows, (row, i) => [row, shown[kind[i]]]));
}

function readStepParts(header: HeaderStepParts, doubles: (ref: ArrayRef) => Float64Array): StepParts {
  const [start, duration, whole, ns] = [header.start, header.duration, header.whole, header.ns].map(doubles);
  const count = header.names.length;
  const isComplete =
    [start, duration, whole, header.causes].every((column) => column.length === count) &&
    ns.length === count * header.parts.length;
  if (!isComplete || ![...start, ...duration, ...ns].every(Number.isFinite)) {
    throw new PayloadError("The timeline in this page is broken: its steps lack values.");
  }
  return {
    parts: header.parts.map(([name, share]) => ({ name: visibleText(name), share })),
    steps: header.names.map((name, i) => ({
      name: visibleText(name),
      start: start[i],
      end: start[i] + duration[i],
      isWhole: whole[i] === 1,
    })),
    causes: header.causes.map((cause) => (cause === null ? null : visibleText(cause))),
    ns,
  };
}

function readComparison(header: HeaderComparison, ofSpan: IntegerArray, spans: Spans): Comparison {
  const isKnown = (change: number) => change === -1 || change in header.changes;
  if (ofSpan.length !== spans.count || !ofSpan.every(isKnown)) {
    throw new PayloadError("The timeline in this page is broken: a span has a change that is not there.");
  }
  return {
    titles: [visibleText(header.titles[0]), visibleText(header.titles[1])],
    notes: header.notes.map(visibleText),
    changes: header.changes.map(
      ([fqn, phase, before, after, difference, low, high, callsBefore, callsAfter, verdict]) => {
        if (!VERDICTS.includes(verdict)) throw new PayloadError(`The timeline in this page has an unknown verdict.`);
        const interval = low === null || high === null ? null : ([low, high] as const);
        return { fqn: visibleText(fqn), phase, before, after, difference, interval, callsBefore, callsAfter, verdict };
      },
    ),
    ofSpan,
  };
}

/** Reject columns with another length, or with an index outside the table that it refers to. */
function validate(spans: Spans, header: Header): void {
  const rules: readonly [keyof Spans, (value: number, i: number) => boolean][] = [
    ["start", (start, i) => Number.isFinite(start) && (i === 0 || start >= spans.start[i - 1])],
    ["end", (end, i) => Number.isFinite(end) && end >= spans.start[i]],
    ["name", (name) => name in header.names],
    ["track", (track) => track in header.tracks],
    ["parent", (index, i) => index >= -1 && index < i],
    ["depth", (depth, i) => depth >= 0 && depth <= i],
    ["phase", (phase) => phase in PHASES],
    ["link", Number.isInteger],
    ["call", Number.isInteger],
    ["step", Number.isInteger],
    ["complete", Number.isInteger],
  ];
  for (const [field, holds] of rules) {
    const column = spans[field] as IntegerArray | undefined;
    if (column?.length !== spans.count) throw new PayloadError(`The timeline in this page lacks values of ${field}.`);
    for (let i = 0; i < spans.count; i++) {
      if (!holds(column[i], i)) {
        throw new PayloadError(`The timeline in this page is broken: span ${i} has ${field} ${column[i]}.`);
      }
    }
  }
  for (const { name, process } of [...header.tracks, ...header.counters]) {
    if (!(process in header.processes)) {
      throw new PayloadError(`The timeline in this page is broken: the track ${visibleText(name)} has no process.`);
    }
  }
}
