/** Which rows the tracks area has, and where: processes, tracks of slices, counters. */
import type { Trace } from "./trace";

export interface Row {
  readonly type: "process" | "track" | "counter";
  /** Names it among all rows, for what is folded. */
  readonly key: string;
  readonly title: string;
  /** Index of the process, the track or the counter. */
  readonly index: number;
  readonly top: number;
  readonly height: number;
  /** Lanes shown. */
  readonly depths: number;
  readonly folded: boolean;
}

/** Sizes in CSS pixels. */
export interface Metrics {
  readonly lane: number;
  readonly header: number;
  readonly counter: number;
  readonly gap: number;
}

/** Sizes for a root font size; a user's larger text makes larger rows. */
export const metricsFor = (rem: number): Metrics => ({
  lane: Math.round(rem * 1.125),
  header: Math.round(rem * 1.375),
  counter: Math.round(rem * 2.75),
  gap: Math.round(rem * 0.375),
});

const KINDS = ["forward", "backward"];

/**
 * Rows from top to bottom. In a process: per thread forward above backward, then GPU tracks, then counters.
 *
 * @param depths the number of lanes of each track
 */
export function rowsOf(trace: Trace, depths: readonly number[], folded: ReadonlySet<string>, metrics: Metrics): Row[] {
  const rows: Row[] = [];
  let top = 0;
  const add = (row: Omit<Row, "top" | "folded">) => {
    rows.push({ ...row, top, folded: folded.has(row.key) });
    top += row.height;
  };
  trace.processes.forEach(({ name }, process) => {
    const header = `process ${process}`;
    const tracks = tracksInOrder(trace, process);
    const counters = [...trace.counters.keys()].filter((i) => trace.counters[i].process === process);
    if (!tracks.length && !counters.length) return;
    add({ type: "process", key: header, title: name, index: process, height: metrics.header, depths: 0 });
    if (folded.has(header)) return;
    for (const index of tracks) {
      const key = `track ${index}`;
      const shown = folded.has(key) ? Math.min(depths[index], 1) : depths[index];
      const height = Math.max(shown, 1) * metrics.lane + metrics.gap;
      add({ type: "track", key, title: trace.tracks[index].name, index, height, depths: shown });
    }
    for (const index of counters) {
      const key = `counter ${index}`;
      const height = folded.has(key) ? metrics.lane + metrics.gap : metrics.counter + metrics.gap;
      add({ type: "counter", key, title: trace.counters[index].name, index, height, depths: 0 });
    }
  });
  return rows;
}

function tracksInOrder({ tracks }: Trace, process: number): number[] {
  const mine = [...tracks.keys()].filter((i) => tracks[i].process === process);
  const thread = (i: number) => mine.findIndex((other) => tracks[other].tid === tracks[i].tid);
  const place = (i: number): number[] => {
    const kind = KINDS.indexOf(tracks[i].kind);
    return kind < 0 ? [1, 0, 0] : [0, thread(i), kind];
  };
  return mine.sort((a, b) => {
    const [one, two] = [place(a), place(b)];
    return one[0] - two[0] || one[1] - two[1] || one[2] - two[2] || a - b;
  });
}

/** The row at a height, if any. */
export const rowAt = (rows: readonly Row[], y: number): Row | undefined =>
  rows.find((row) => y >= row.top && y < row.top + row.height);

/** The top of a lane; of the row itself where the lane is folded away. */
export const laneTop = (row: Row, depth: number, metrics: Metrics): number =>
  row.top + Math.floor(metrics.gap / 2) + (depth < row.depths ? depth * metrics.lane : 0);
