/** The page's state: the trace, and the signals that its parts share. */
import { batch, computed, signal } from "@preact/signals";

import { assignColors } from "./color";
import { layoutRows, metricsFor } from "./layout/rows";
import { clamp, reveal, withMargin } from "./layout/viewport";
import { buildDepthLevels } from "./trace/depth-levels";
import { matchingNames, matchingSpans, nextMatch } from "./trace/search";
import { shownStep, stepBeside, stepsOf } from "./trace/steps";
import { type Device, type Grouping, groupsOf } from "./trace/totals";
import { extent, spansByLink, type TimeRange, type Trace } from "./trace/trace";

export type Tab = "selection" | "modules" | "flame" | "recording";

export function createStore(trace: Trace) {
  const bounds = extent(trace);
  const levels = buildDepthLevels(trace.spans, trace.tracks.length);
  const steps = stepsOf(trace);

  const viewport = signal<TimeRange>(withMargin(bounds, bounds));
  /** Index of the selected span, -1 for none. */
  const selected = signal(-1);
  /** The range of time that totals are of; null for the whole recording. */
  const range = signal<TimeRange | null>(null);
  const query = signal("");
  /** Keys of folded rows. */
  const folded = signal<ReadonlySet<string>>(new Set());
  const tab = signal<Tab>("selection");
  const grouping = signal<Grouping>("module");
  const device = signal<Device>("cpu");
  /** The root font size in CSS pixels. */
  const rem = signal(16);
  /** Counts up when the selection must be scrolled into sight. */
  const scrollRequests = signal(0);

  const metrics = computed(() => metricsFor(rem.value));
  const depthCounts = levels.map((depths) => depths.length);
  const rows = computed(() => layoutRows(trace, depthCounts, folded.value, metrics.value));
  /** One flag per name; null where nothing is searched. */
  const nameMatches = computed(() => matchingNames(trace.names, query.value));
  const matches = computed(() => matchingSpans(trace.spans, nameMatches.value));
  const groups = computed(() => groupsOf(trace, grouping.value));
  /** Index of the one step in sight, and of those that the keys lead to; -1 for none. */
  const step = computed(() => shownStep(steps, viewport.value));
  const previousStep = computed(() => stepBeside(steps, viewport.value, -1));
  const nextStep = computed(() => stepBeside(steps, viewport.value, 1));

  let byLink: Map<number, number[]> | undefined;
  /** All spans of a span's call, itself too: forward, backward, recompute. Empty where none is linked. */
  const linkedSpans = (span: number): readonly number[] => {
    if (span < 0 || trace.spans.link[span] < 0) return [];
    byLink ??= spansByLink(trace.spans);
    return byLink.get(trace.spans.link[span]) ?? [];
  };

  const rangeOf = (span: number): TimeRange => ({ start: trace.spans.start[span], end: trace.spans.end[span] });

  const unfold = (span: number) => {
    const track = trace.spans.track[span];
    const keys = [`track ${track}`, `process ${trace.tracks[track].process}`];
    if (!keys.some((key) => folded.value.has(key))) return;
    folded.value = new Set([...folded.value].filter((key) => !keys.includes(key)));
  };

  /** Select a span (-1 for none) and, with `show`, bring it into sight. */
  const select = (span: number, options: { show: boolean } = { show: true }) =>
    batch(() => {
      selected.value = span;
      if (span < 0) return;
      tab.value = "selection";
      if (!options.show) return;
      unfold(span);
      viewport.value = reveal(viewport.value, rangeOf(span), bounds);
      scrollRequests.value++;
    });

  const selectMatch = (direction: 1 | -1) => {
    const next = nextMatch(matches.value, selected.value, direction);
    if (next >= 0) select(next);
  };

  /** Zoom to a range, with a margin. */
  const show = (target: TimeRange) => {
    viewport.value = withMargin(target, bounds);
  };

  /** Zoom to a step; to none (-1) changes nothing. */
  const toStep = (index: number) => {
    if (steps[index]) show(steps[index]);
  };

  const setRange = (next: TimeRange | null) =>
    batch(() => {
      range.value = next;
      if (next && tab.value !== "flame") tab.value = "modules";
    });

  const toggleFold = (key: string) => {
    const next = new Set(folded.value);
    if (!next.delete(key)) next.add(key);
    folded.value = next;
  };

  return {
    trace,
    bounds,
    levels,
    steps,
    classColors: assignColors(trace.names.map((name) => name.moduleClass || name.label)),
    viewport,
    selected,
    range,
    query,
    folded,
    tab,
    grouping,
    device,
    rem,
    scrollRequests,
    metrics,
    rows,
    nameMatches,
    matches,
    groups,
    step,
    previousStep,
    nextStep,
    linkedSpans,
    rangeOf,
    select,
    selectMatch,
    show,
    showAll: () => show(bounds),
    toStep,
    setRange,
    toggleFold,
    moveTo: (next: TimeRange) => {
      viewport.value = clamp(next, bounds);
    },
  };
}

export type Store = ReturnType<typeof createStore>;
