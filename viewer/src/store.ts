/** The page's state: the trace, and the signals that its parts share. */
import { batch, computed, type ReadonlySignal, signal } from "@preact/signals";
import { countBars } from "./analysis/bar-counts";
import { COSTS, type Cost, costsOf, hasFlops, isCost, SHADES, shadeOf } from "./analysis/costs";
import { matchSpans, parseQuery, QueryError } from "./analysis/query";
import { flaggedSpans, nextMatch } from "./analysis/search";
import type { Device } from "./analysis/spans-in-range";
import { type Grouping, groupsOf } from "./analysis/totals";
import {
  assignColors,
  type Color,
  colorKey,
  colorOfChange,
  GIVEN_HUE,
  NOTHING,
  shades,
  TAKEN_HUE,
  UNKNOWN,
  VERDICT_COLORS,
} from "./color";
import { layoutRows, metricsFor } from "./layout/rows";
import { clamp, overlapOf, reveal, withMargin } from "./layout/viewport";
import { buildDepthLevels } from "./trace/depth-levels";
import { type Finding, spanOf, stepOf } from "./trace/findings";
import { isMemory } from "./trace/memory";
import { type Step, shownStep, stepBeside, stepsOf } from "./trace/steps";
import { extent, spansByLink, type TimeRange, type Trace } from "./trace/trace";

export type Tab = "findings" | "changes" | "selection" | "modules" | "steps" | "flame" | "recording";
/** The meaning of span colours: the class, the change, or a cost. */
export type ColorBy = "class" | "change" | Cost;

/** The colours of spans. */
export interface Coloring {
  readonly colors: readonly Color[];
  /** Index into `colors`. */
  readonly ofSpan: (span: number) => number;
}

/** Steps without marks (calls can be steps). A single one is the whole recording, so it is not used. */
function unmarkedSteps({ stepParts }: Trace): readonly Step[] {
  return stepParts && stepParts.steps.length > 1 ? stepParts.steps : [];
}

export function createStore(trace: Trace) {
  const bounds = extent(trace);
  const levels = buildDepthLevels(trace.spans, trace.tracks.length);
  const marked = stepsOf(trace);
  const steps: readonly Step[] = marked.length ? marked : unmarkedSteps(trace);

  /** The viewport that shows the whole trace. */
  const home = withMargin(bounds, bounds);
  const viewport = signal<TimeRange>(home);
  /** Index of the selected span, -1 for none. */
  const selected = signal(-1);
  /** The range of time that totals cover; null for the whole recording. */
  const range = signal<TimeRange | null>(null);
  const query = signal("");
  /** Keys of folded rows. */
  const folded = signal<ReadonlySet<string>>(new Set());
  const { comparison } = trace;
  const found: readonly Tab[] = trace.findings.length ? ["findings"] : [];
  /** A comparison has no totals, because they would mix its two sides. */
  const tabs: readonly Tab[] = comparison
    ? ["changes", "selection", "recording"]
    : [...found, "selection", "modules", ...(steps.length > 1 ? (["steps"] as const) : []), "flame", "recording"];
  const firstTab: Tab = comparison ? "changes" : (found[0] ?? "modules");
  const tab = signal<Tab>(firstTab);
  /** The values that colours can show for this trace; the first is the default. */
  const colorings: readonly ColorBy[] = [
    ...(comparison ? (["change"] as const) : []),
    "class",
    ...(trace.counters.some(isMemory) ? (["retained", "peak"] as const) : []),
    ...(hasFlops(trace) ? (["flops"] as const) : []),
  ];
  const colorBy = signal(colorings[0]);
  /** The change whose spans are highlighted, an index into the comparison's changes; null for none. */
  const pickedChange = signal<number | null>(null);
  const grouping = signal<Grouping>("module");
  /** The module or class whose spans are highlighted, an index into the groups of `grouping`; null for none. */
  const pickedGroup = signal<number | null>(null);
  const device = signal<Device>("cpu");
  /** The root font size in CSS pixels. */
  const rem = signal(16);
  /** Maximum number of depth levels shown of each track. */
  const maxLevels = signal(Infinity);
  /** Increases when the viewport jumps to a target, but not when it pans or zooms. */
  const jumps = signal(0);
  /** Increases when the selection must be scrolled into view. */
  const scrollRequests = signal(0);

  const metrics = computed(() => metricsFor(rem.value));
  const depthCounts = levels.map((depths) => depths.length);
  /** Number of depth levels of the deepest track. */
  const deepest = depthCounts.reduce((most, count) => Math.max(most, count), 0);
  const rows = computed(() => {
    const depths = depthCounts.map((count) => Math.min(count, maxLevels.value));
    return layoutRows(trace, depths, folded.value, metrics.value);
  });
  const groups = computed(() => groupsOf(trace, grouping.value));
  /**
   * The result of the search: a flag per span (null without a search), and the error of a query that cannot be parsed.
   */
  const search = computed((): { readonly flags: Uint8Array | null; readonly error: string } => {
    try {
      return { flags: matchSpans(trace, parseQuery(query.value)), error: "" };
    } catch (error) {
      if (!(error instanceof QueryError)) throw error;
      return { flags: new Uint8Array(trace.spans.count), error: error.message };
    }
  });
  /** A flag per span: 1 if it matches the search and the picked group or change; null if there is neither. */
  const highlighted = computed(() => {
    const { flags } = search.value;
    const change = pickedChange.value;
    const group = pickedGroup.value;
    if (comparison && change !== null) {
      return Uint8Array.from(comparison.ofSpan, (other, i) => (other === change ? (flags?.[i] ?? 1) : 0));
    }
    if (group === null) return flags;
    const { ofName } = groups.value;
    return Uint8Array.from(trace.spans.name, (name, i) => (ofName[name] === group ? (flags?.[i] ?? 1) : 0));
  });
  const classColors = assignColors(trace.names.map(colorKey));
  const costs = Object.fromEntries(COSTS.map((cost) => [cost, computed(() => costsOf(trace, cost))])) as Record<
    Cost,
    ReadonlySignal<Float64Array>
  >;
  /** The cost that colours show; null if they show no cost. */
  const coloredCost = computed(() => {
    const cost = colorBy.value;
    if (!isCost(cost)) return null;
    const ofSpan = costs[cost].value;
    const sizes = ofSpan.map((value) => Math.abs(value) || 0);
    return { cost, ofSpan, most: sizes.reduce((a, b) => Math.max(a, b), 0) };
  });
  const coloring = computed((): Coloring => {
    if (coloredCost.value) {
      const { cost, ofSpan, most } = coloredCost.value;
      const given = shades(GIVEN_HUE, SHADES).reverse();
      const colors = [...given, NOTHING, ...shades(TAKEN_HUE, SHADES), UNKNOWN];
      const unknown = colors.length - 1;
      return {
        colors,
        ofSpan: (span) => (Number.isNaN(ofSpan[span]) ? unknown : SHADES + shadeOf(cost, ofSpan[span], most)),
      };
    }
    if (comparison && colorBy.value === "change") {
      // For spans that were not compared, such as work on GPUs.
      const unknown = comparison.changes.length;
      const colors = [...comparison.changes.map(colorOfChange), VERDICT_COLORS["cannot tell"]];
      return { colors, ofSpan: (span) => (comparison.ofSpan[span] < 0 ? unknown : comparison.ofSpan[span]) };
    }
    const position = new Map([...classColors.keys()].map((moduleClass, i) => [moduleClass, i]));
    const ofName = Int32Array.from(trace.names, (name) => position.get(colorKey(name))!);
    return { colors: [...classColors.values()], ofSpan: (span) => ofName[trace.spans.name[span]] };
  });
  const matches = computed(() => flaggedSpans(highlighted.value));
  const matchCounts = computed(() => countBars(trace, (bar) => highlighted.value?.[bar] === 1));
  /** Index of the step that fills the view, and of those that the keys go to; -1 for none. */
  const step = computed(() => shownStep(steps, viewport.value));
  const previousStep = computed(() => stepBeside(steps, viewport.value, -1));
  const nextStep = computed(() => stepBeside(steps, viewport.value, 1));

  let byLink: Map<number, number[]> | undefined;
  /**
   * All spans of a span's call, including the span itself: forward, backward, recompute. Empty if the span has no link.
   */
  const linkedSpans = (span: number): readonly number[] => {
    if (span < 0 || trace.spans.link[span] < 0) return [];
    byLink ??= spansByLink(trace.spans);
    return byLink.get(trace.spans.link[span]) ?? [];
  };

  const rangeOf = (span: number): TimeRange => ({ start: trace.spans.start[span], end: trace.spans.end[span] });

  const unfold = (span: number) => {
    const track = trace.spans.track[span];
    maxLevels.value = Math.max(maxLevels.value, trace.spans.depth[span] + 1);
    const keys = [`track ${track}`, `process ${trace.tracks[track].process}`];
    if (!keys.some((key) => folded.value.has(key))) return;
    folded.value = new Set([...folded.value].filter((key) => !keys.includes(key)));
  };

  /** Select a span (-1 for none) and, with `show`, bring it into view. */
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

  /** Zoom to the place of a finding, and select its module or range. */
  const showFinding = (finding: Finding) =>
    batch(() => {
      const from = tab.value;
      const span = spanOf(trace, finding);
      const place = span < 0 ? stepOf(trace, finding) : rangeOf(span);
      select(span);
      if (place) show(place);
      tab.value = from;
    });

  const selectMatch = (direction: 1 | -1) => {
    const next = nextMatch(matches.value, selected.value, direction);
    if (next >= 0) select(next);
  };

  /** Zoom to a range, with a margin. */
  const show = (target: TimeRange) => {
    viewport.value = target === bounds ? home : withMargin(target, bounds);
    jumps.value++;
  };

  /** Zoom to a step; -1 changes nothing. */
  const toStep = (index: number) => {
    if (steps[index]) show(steps[index]);
  };

  /** Choose the range of time that totals cover. It is cut at the ends of the recording. */
  const setRange = (next: TimeRange | null) =>
    batch(() => {
      range.value = next && overlapOf(next, bounds);
      if (range.value && tabs.includes("modules") && tab.value !== "flame") tab.value = "modules";
    });

  const groupBy = (by: Grouping) =>
    batch(() => {
      grouping.value = by;
      pickedGroup.value = null;
    });

  /** Highlight the spans of a group, or remove the highlight if it is picked already. */
  const pickGroup = (group: number | null) => {
    pickedGroup.value = group === pickedGroup.value ? null : group;
  };

  const toggleFold = (key: string) => {
    const next = new Set(folded.value);
    if (!next.delete(key)) next.add(key);
    folded.value = next;
  };

  const processKeys = rows.peek().flatMap(({ type, key }) => (type === "process" ? [key] : []));
  /** Fold all processes, or unfold them if all are folded. */
  const foldAll = () => {
    const allFolded = processKeys.every((key) => folded.value.has(key));
    const others = [...folded.value].filter((key) => !processKeys.includes(key));
    folded.value = new Set(allFolded ? others : [...others, ...processKeys]);
  };

  return {
    trace,
    processKeys,
    foldAll,
    bounds,
    spanCount: countBars(trace, () => true).spans,
    levels,
    steps,
    classColors,
    coloring,
    colorings,
    colorBy,
    costs,
    coloredCost,
    pickedChange,
    pickChange: (change: number | null) => {
      pickedChange.value = change === pickedChange.value ? null : change;
    },
    home,
    deepest,
    hasGpu: trace.tracks.some(({ kind }) => kind === "gpu"),
    viewport,
    maxLevels,
    jumps,
    selected,
    range,
    query,
    folded,
    tabs,
    firstTab,
    tab,
    grouping,
    device,
    rem,
    scrollRequests,
    metrics,
    rows,
    search,
    highlighted,
    pickedGroup,
    pickGroup,
    groupBy,
    matches,
    matchCounts,
    groups,
    step,
    previousStep,
    nextStep,
    linkedSpans,
    rangeOf,
    select,
    selectMatch,
    showFinding,
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
