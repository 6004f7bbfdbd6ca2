/** The findings of a recording, equal to those of `Timeline.summary()`, and their places. */
import { partsOfStep } from "./step-parts";
import type { TimeRange, Trace } from "./trace";
import { PHASES } from "./trace";

export interface Finding {
  readonly what: string;
  /** The full name of a module, or the name of a range; null if the finding is about neither. */
  readonly where: string | null;
  /** The part of a step; null if the finding is not about a part of the steps' time. */
  readonly part: string | null;
  readonly ns_per_step: number;
  /** Share of the time of all steps. */
  readonly share: number;
  readonly evidence: string;
  /** A command that shows more. */
  readonly next: string;
}

/** Index of the longest span with the name of a finding, if possible in its phase; -1 for none. */
export function spanOf({ spans, names }: Trace, { where, part }: Finding): number {
  const named = names.map(({ fqn, label }) => fqn === where || label === where);
  const all = Array.from(spans.start.keys()).filter((span) => named[spans.name[span]]);
  const inPhase = all.filter((span) => PHASES[spans.phase[span]] === part);
  const duration = (span: number) => spans.end[span] - spans.start[span];
  return (inPhase.length ? inPhase : all).reduce((a, b) => (a < 0 || duration(b) > duration(a) ? b : a), -1);
}

/** The step with the longest time in the part of a finding; null if no step is known, or none has the part. */
export function stepOf({ stepParts }: Trace, { part }: Finding): TimeRange | null {
  const index = stepParts?.parts.findIndex(({ name }) => name === part) ?? -1;
  if (!stepParts || index < 0) return null;
  const ns = stepParts.steps.map((_, step) => partsOfStep(stepParts, step)[index]);
  return stepParts.steps[ns.indexOf(ns.reduce((a, b) => Math.max(a, b), 0))] ?? null;
}
