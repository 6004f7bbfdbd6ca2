/** One line of text for each place in the timeline, for the tooltip and for screen readers. */
import { formatDuration, formatMoment, formatQuantity } from "../format";
import { sampleAt } from "../trace/memory";
import { type CounterSeries, isOfModules, type Mark, PHASES, type Trace } from "../trace/trace";

/** `forward`, `GPU backward`; for a track without modules, which has no phase, its kind, such as `communication`. */
export function describePhase({ spans, tracks }: Trace, span: number): string {
  const track = tracks[spans.track[span]];
  if (!isOfModules(track)) return track.kind;
  return `${track.kind === "gpu" ? "GPU " : ""}${PHASES[spans.phase[span] as 0 | 1 | 2]}`;
}

/** `h.0: Block, forward, 300 µs` */
export function describeSpan(trace: Trace, span: number): string {
  const { spans, names } = trace;
  const duration = formatDuration(spans.end[span] - spans.start[span]);
  const state = spans.complete[span] ? "" : ", incomplete";
  return `${names[spans.name[span]].label}, ${describePhase(trace, span)}, ${duration}${state}`;
}

/** `process RSS, 1.5 GiB at 12.5 ms`: the last sample before a time, valid until the next; null before the first. */
export function describeCounter(counter: CounterSeries, moment: number): string | null {
  const { name, unit, time, value } = counter;
  const index = sampleAt(counter, moment);
  return index < 0 ? null : `${name}, ${formatQuantity(value[index], unit)} at ${formatMoment(time[index])}`;
}

/** Maximum number of listed holders at a peak; the others are only summed. */
const MAX_HOLDERS = 10;

/** The holders of memory at its peak with their bytes, largest first. */
export function describeHolders({ holders }: Trace): { readonly name: string; readonly value: string }[] {
  if (!holders) return [];
  const rows = [...holders.rows];
  const between = rows.splice(MAX_HOLDERS, rows.length - MAX_HOLDERS - 1);
  if (between.length) rows.splice(-1, 0, ["more modules", between.reduce((sum, [, bytes]) => sum + bytes, 0)]);
  return rows.map(([name, bytes]) => ({ name, value: formatQuantity(bytes, "bytes") }));
}

/** `step 3, the end of a training step, at 12.5 ms` */
export function describeMark({ kind, text, time }: Mark): string {
  const meaning = kind === "step" ? ", the end of a training step" : "";
  return `${text || kind}${meaning}, at ${formatMoment(time)}`;
}

/** The mark nearest to a time, at most `toleranceNs` away; undefined if there is none. */
export function markAt(marks: readonly Mark[], time: number, toleranceNs: number): Mark | undefined {
  let nearest: Mark | undefined;
  let nearestDistance = toleranceNs;
  for (const mark of marks) {
    const distance = Math.abs(mark.time - time);
    if (distance > nearestDistance) continue;
    nearest = mark;
    nearestDistance = distance;
  }
  return nearest;
}
