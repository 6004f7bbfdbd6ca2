/** The rows of the tracks area and their positions: processes, tracks of spans, counters. */
import { isMemory } from "../trace/memory";
import { THREAD_KINDS, type Trace } from "../trace/trace";

export interface Row {
  readonly type: "process" | "track" | "counter";
  /** Unique among all rows; the key of the row in the set of folded rows. */
  readonly key: string;
  readonly title: string;
  /** Index of the process, the track or the counter. */
  readonly index: number;
  /** CSS pixels from the top of all rows. */
  readonly top: number;
  readonly height: number;
  /** Number of depth levels shown. */
  readonly depths: number;
  readonly folded: boolean;
}

/** Heights in CSS pixels. */
export interface Metrics {
  /** One depth level of a track. */
  readonly level: number;
  /** The header of a process. */
  readonly header: number;
  readonly counter: number;
  /** Free space in a row, half above and half below its levels. */
  readonly gap: number;
}

/** Heights for a root font size in CSS pixels; larger text makes larger rows. */
export const metricsFor = (rem: number): Metrics => ({
  level: Math.round(rem * 1.125),
  header: Math.round(rem * 1.375),
  counter: Math.round(rem * 2.75),
  gap: Math.round(rem * 0.375),
});

/**
 * Rows from top to bottom. In a process: memory of tensors, the tracks of each thread, GPU tracks, then other counters.
 *
 * @param depths the number of depth levels of each track
 */
export function layoutRows(
  trace: Trace,
  depths: readonly number[],
  folded: ReadonlySet<string>,
  metrics: Metrics,
): Row[] {
  const rows: Row[] = [];
  let y = 0;
  const add = (row: Omit<Row, "top" | "folded">) => {
    rows.push({ ...row, top: y, folded: folded.has(row.key) });
    y += row.height;
  };
  trace.processes.forEach(({ name: title }, process) => {
    const header = `process ${process}`;
    const tracks = tracksInOrder(trace, process);
    const counters = [...trace.counters.keys()].filter((i) => trace.counters[i].process === process);
    if (!tracks.length && !counters.length) return;
    add({ type: "process", key: header, title, index: process, height: metrics.header, depths: 0 });
    if (folded.has(header)) return;
    const addCounters = (indexes: readonly number[]) => {
      for (const index of indexes) {
        const key = `counter ${index}`;
        const height = folded.has(key) ? metrics.level + metrics.gap : metrics.counter + metrics.gap;
        add({ type: "counter", key, title: trace.counters[index].name, index, height, depths: 0 });
      }
    };
    addCounters(counters.filter((i) => isMemory(trace.counters[i])));
    for (const index of tracks) {
      const key = `track ${index}`;
      const shown = folded.has(key) ? Math.min(depths[index], 1) : depths[index];
      const height = Math.max(shown, 1) * metrics.level + metrics.gap;
      add({ type: "track", key, title: trace.tracks[index].name, index, height, depths: shown });
    }
    addCounters(counters.filter((i) => !isMemory(trace.counters[i])));
  });
  return rows;
}

function tracksInOrder({ tracks }: Trace, process: number): number[] {
  const members = [...tracks.keys()].filter((i) => tracks[i].process === process);
  const threadOrder = (i: number) => members.findIndex((other) => tracks[other].tid === tracks[i].tid);
  const sortKey = (i: number): [number, number, number] => {
    const kind = THREAD_KINDS.indexOf(tracks[i].kind);
    return kind < 0 ? [1, 0, 0] : [0, threadOrder(i), kind];
  };
  return members.sort((a, b) => {
    const [one, other] = [sortKey(a), sortKey(b)];
    return one[0] - other[0] || one[1] - other[1] || one[2] - other[2] || a - b;
  });
}

/** CSS pixels from the top of all rows to the end of the last given row. */
export function rowsHeight(rows: readonly Row[]): number {
  const last = rows.at(-1);
  return last ? last.top + last.height : 0;
}

/** The rows of each process: its header and the rows below it. */
export function rowsByProcess(rows: readonly Row[]): Row[][] {
  const groups: Row[][] = [];
  for (const row of rows) {
    if (row.type === "process") groups.push([row]);
    else groups[groups.length - 1].push(row);
  }
  return groups;
}

/** The row at a height in CSS pixels, if any. */
export const rowAt = (rows: readonly Row[], y: number): Row | undefined =>
  rows.find((row) => y >= row.top && y < row.top + row.height);

/** The top of a depth level in CSS pixels; if that level is folded, the top of the row's first level. */
export const levelTop = (row: Row, depth: number, metrics: Metrics): number =>
  row.top + Math.floor(metrics.gap / 2) + (depth < row.depths ? depth * metrics.level : 0);

/** The depth of a track's row at a height in CSS pixels; -1 above or below its levels. */
export function depthAt(row: Row, y: number, metrics: Metrics): number {
  const depth = Math.floor((y - levelTop(row, 0, metrics)) / metrics.level);
  return row.type === "track" && depth >= 0 && depth < row.depths ? depth : -1;
}
