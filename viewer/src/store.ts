/** What the page shows: the trace, and the state that its parts share. */
import { batch, computed, signal } from "@preact/signals";

import { type Device, type Grouping, groupsOf } from "./aggregate";
import { colors } from "./color";
import { lanesOf } from "./lanes";
import { metricsFor, rowsOf } from "./layout";
import { finds, matchingNames, nextFind } from "./search";
import { stepAt, stepsOf } from "./steps";
import { extent, linked, type Trace, type Window } from "./trace";
import { around, clamp, reveal } from "./window";

export type Tab = "selection" | "modules" | "flame" | "recording";

export function createStore(trace: Trace) {
  const bounds = extent(trace);
  const lanes = lanesOf(trace.spans, trace.tracks.length);
  const steps = stepsOf(trace);

  const window = signal<Window>(around(bounds, bounds));
  const selected = signal(-1);
  const range = signal<Window | null>(null);
  const query = signal("");
  const folded = signal<ReadonlySet<string>>(new Set());
  const tab = signal<Tab>("selection");
  const grouping = signal<Grouping>("module");
  const device = signal<Device>("cpu");
  const rem = signal(16);
  /** Counts up when the selection must be scrolled into sight. */
  const scroll = signal(0);

  const metrics = computed(() => metricsFor(rem.value));
  const rows = computed(() => rowsOf(trace, lanes.map((depths) => depths.length), folded.value, metrics.value));
  const wanted = computed(() => matchingNames(trace.names, query.value));
  const found = computed(() => finds(trace.spans, wanted.value));
  const groups = computed(() => groupsOf(trace, grouping.value));

  let byLink: Map<number, number[]> | undefined;
  /** The other slices of a span's call: its backward for a forward, its forward for a backward. */
  const halves = (span: number): readonly number[] => {
    if (span < 0 || trace.spans.link[span] < 0) return [];
    byLink ??= linked(trace.spans);
    return byLink.get(trace.spans.link[span]) ?? [];
  };

  const stretch = (span: number): Window => ({ start: trace.spans.start[span], end: trace.spans.end[span] });

  const select = (span: number, options: { show: boolean } = { show: true }) =>
    batch(() => {
      selected.value = span;
      if (span < 0) return;
      tab.value = "selection";
      if (!options.show) return;
      const track = trace.spans.track[span];
      const hidden = [`track ${track}`, `process ${trace.tracks[track].process}`];
      if (hidden.some((key) => folded.value.has(key))) {
        folded.value = new Set([...folded.value].filter((key) => !hidden.includes(key)));
      }
      window.value = reveal(window.value, stretch(span), bounds);
      scroll.value++;
    });

  const find = (direction: 1 | -1) => {
    const next = nextFind(found.value, selected.value, direction);
    if (next >= 0) select(next);
  };

  const show = (part: Window) => {
    window.value = around(part, bounds);
  };

  /** The step under the middle of the window. */
  const step = computed(() => stepAt(steps, (window.value.start + window.value.end) / 2));

  const toStep = (index: number) => {
    const target = steps[Math.min(Math.max(index, 0), steps.length - 1)];
    if (target) show(target);
  };

  const setRange = (part: Window | null) =>
    batch(() => {
      range.value = part;
      if (part && tab.value !== "flame") tab.value = "modules";
    });

  const fold = (key: string) => {
    const next = new Set(folded.value);
    if (!next.delete(key)) next.add(key);
    folded.value = next;
  };

  return {
    trace,
    bounds,
    lanes,
    steps,
    colors: colors(trace.names.map((name) => name.moduleClass || name.label)),
    window,
    selected,
    range,
    query,
    folded,
    tab,
    grouping,
    device,
    rem,
    scroll,
    metrics,
    rows,
    wanted,
    found,
    groups,
    step,
    halves,
    stretch,
    select,
    find,
    show,
    showAll: () => show(bounds),
    toStep,
    setRange,
    fold,
    move: (next: Window) => {
      window.value = clamp(next, bounds);
    },
  };
}

export type Store = ReturnType<typeof createStore>;
