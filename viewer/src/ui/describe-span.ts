/** A span in one line, for the tooltip and for screen readers: `h.0: Block, forward, 300 µs`. */
import { formatDuration } from "../format";
import { PHASES, type Trace } from "../trace/trace";

export function describeSpan({ spans, names, tracks }: Trace, span: number): string {
  const phase = tracks[spans.track[span]].kind === "gpu" ? "GPU" : PHASES[spans.phase[span] as 0 | 1 | 2];
  const duration = formatDuration(spans.end[span] - spans.start[span]);
  const state = spans.complete[span] ? "" : ", incomplete";
  return `${names[spans.name[span]].label}, ${phase}, ${duration}${state}`;
}
