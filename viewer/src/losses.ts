/** What a recording lost, in sentences. */
import { formatCount, plural } from "./text";
import type { Trace } from "./trace";

/** Slices whose begin or end is not known. */
export function incompleteIn({ spans }: Trace): number {
  let count = 0;
  for (let i = 0; i < spans.count; i++) if (!spans.complete[i]) count++;
  return count;
}

/** One sentence per kind of loss; none where all is there. */
export function lossesOf(trace: Trace): string[] {
  const { recorded = 0, overwritten = 0, torn = 0, unfinished = 0, unstarted = 0, unattributed = 0 } = trace.stats;
  const sentences: string[] = [];
  const say = (count: number, sentence: () => string) => {
    if (count > 0) sentences.push(sentence());
  };
  say(overwritten, () => `${formatCount(overwritten)} of ${plural(recorded, "event")} were overwritten by newer ones: what came first is not shown.`);
  say(torn, () => `${plural(torn, "event")} cannot be read: they were being written when the recording was read or its process died.`);
  say(unstarted, () => `${plural(unstarted, "slice")} began before the oldest event that was kept: drawn from there on.`);
  say(unfinished, () => `${plural(unfinished, "slice")} never ended: drawn to the last event.`);
  say(unattributed, () => `${plural(unattributed, "autograd node")} of backward belong to no module and are not shown.`);
  const incomplete = incompleteIn(trace);
  say(incomplete, () => `${plural(incomplete, "slice")} of this timeline ${incomplete === 1 ? "is" : "are"} incomplete, drawn with stripes.`);
  return sentences;
}
