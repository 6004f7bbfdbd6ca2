/** How many of what is drawn as bars: spans of modules, and what else threads do, which is none. */
import { plural } from "../format";
import { isOfModules, type Trace } from "../trace/trace";

export interface BarCounts {
  readonly all: number;
  readonly spans: number;
  /** Whole backward passes. */
  readonly passes: number;
  /** Calls of torch.distributed, and waits for them. */
  readonly communication: number;
}

/** Count the bars of a trace, by index, for which `isCounted` holds. */
export function countBars({ spans, tracks }: Trace, isCounted: (bar: number) => boolean): BarCounts {
  const perTrack = new Array<number>(tracks.length).fill(0);
  for (let i = 0; i < spans.count; i++) if (isCounted(i)) perTrack[spans.track[i]]++;
  const counts = { all: 0, spans: 0, passes: 0, communication: 0 };
  tracks.forEach((track, i) => {
    counts.all += perTrack[i];
    const kind = isOfModules(track) ? "spans" : track.kind === "backward pass" ? "passes" : "communication";
    counts[kind] += perTrack[i];
  });
  return counts;
}

/** `425 spans, 5 backward passes`: each kind that there is. */
export function describeBars({ spans, passes, communication }: BarCounts): string {
  const parts = [
    spans && plural(spans, "span"),
    passes && plural(passes, "backward pass", "backward passes"),
    communication && plural(communication, "communication call"),
  ];
  return parts.filter(Boolean).join(", ") || plural(0, "span");
}
