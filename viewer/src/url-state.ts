/** The view in the page's address, which a link, a reload, back and forward restore. */
import { batch, effect } from "@preact/signals";
import { COSTS } from "./analysis/costs";
import { overlapOf } from "./layout/viewport";
import type { Session, StepPair } from "./session";
import type { ColorBy, Store, Tab } from "./store";
import type { TimeRange } from "./trace/trace";

const TABS: readonly Tab[] = ["findings", "changes", "selection", "modules", "steps", "flame", "recording"];
const COLORINGS: readonly ColorBy[] = ["class", "change", ...COSTS];
/** Time from the last change until the address is updated. */
const QUIET_MS = 250;

/** The contents of the address. Each part is optional, so a link may contain only the relevant parts. */
export interface ViewState {
  /** The two steps shown side by side; then all other parts refer to them. */
  readonly compare?: StepPair;
  readonly viewport?: TimeRange;
  readonly range?: TimeRange;
  readonly selected?: number;
  readonly tab?: Tab;
  readonly query?: string;
  readonly by?: "class";
  readonly on?: "gpu";
  readonly levels?: number;
  readonly folded?: readonly string[];
  /** Index of the highlighted module or class. */
  readonly group?: number;
  /** Index of the highlighted change. */
  readonly change?: number;
  readonly color?: ColorBy;
}

/** Times are in ns after the trace's base, rounded to a thousandth. */
const encodeRange = ({ start, end }: TimeRange): string => `${+start.toFixed(3)},${+end.toFixed(3)}`;

function decodeRange(text: string | null): TimeRange | undefined {
  const [start, end, ...rest] = (text ?? "").split(",").map((part) => (part.trim() ? Number(part) : Number.NaN));
  return rest.length === 0 && start < end && Number.isFinite(end - start) ? { start, end } : undefined;
}

function decodePair(text: string | null): StepPair | undefined {
  const [first, second, ...rest] = (text ?? "").split(",").map(decodeIndex);
  return rest.length === 0 && first !== undefined && second !== undefined ? [first, second] : undefined;
}

function decodeIndex(text: string | null): number | undefined {
  return text && /^\d{1,15}$/.test(text) ? Number(text) : undefined;
}

/** The part of the address after the `#`. */
export function encodeView(view: ViewState): string {
  const parameters = new URLSearchParams();
  const add = (key: string, value: string | number | undefined) => {
    if (value !== undefined && value !== "") parameters.set(key, String(value));
  };
  add("compare", view.compare?.join(","));
  add("view", view.viewport && encodeRange(view.viewport));
  add("range", view.range && encodeRange(view.range));
  add("span", view.selected);
  add("tab", view.tab);
  add("search", view.query);
  add("by", view.by);
  add("on", view.on);
  add("levels", view.levels);
  add("group", view.group);
  add("change", view.change);
  add("color", view.color);
  add("fold", view.folded?.map((key) => key.replace(" ", "-")).join(","));
  // Commas are allowed in a fragment without encoding.
  return parameters.toString().replaceAll("%2C", ",");
}

/** Parse the output of `encodeView`, and ignore invalid parts. */
export function decodeView(hash: string): ViewState {
  const parameters = new URLSearchParams(hash.replace(/^#/, ""));
  const tab = TABS.find((name) => name === parameters.get("tab"));
  const folded = parameters
    .get("fold")
    ?.split(",")
    .filter((key) => /^(process|track|counter)-\d+$/.test(key))
    .map((key) => key.replace("-", " "));
  const view: ViewState = {
    compare: decodePair(parameters.get("compare")),
    viewport: decodeRange(parameters.get("view")),
    range: decodeRange(parameters.get("range")),
    selected: decodeIndex(parameters.get("span")),
    tab,
    query: parameters.get("search") ?? undefined,
    by: parameters.get("by") === "class" ? "class" : undefined,
    on: parameters.get("on") === "gpu" ? "gpu" : undefined,
    levels: decodeIndex(parameters.get("levels")),
    folded: folded?.length ? folded : undefined,
    group: decodeIndex(parameters.get("group")),
    change: decodeIndex(parameters.get("change")),
    color: COLORINGS.find((name) => name === parameters.get("color")),
  };
  return Object.fromEntries(Object.entries(view).filter(([, value]) => value !== undefined));
}

function readView({ compared, store: { value: store } }: Session): ViewState {
  const { viewport, home, range, selected, tab, query, grouping, device, maxLevels, folded, pickedGroup } = store;
  return {
    compare: compared.value ?? undefined,
    viewport: viewport.value === home ? undefined : viewport.value,
    range: range.value ?? undefined,
    selected: selected.value < 0 ? undefined : selected.value,
    tab: tab.value,
    query: query.value,
    by: grouping.value === "class" ? "class" : undefined,
    on: device.value === "gpu" ? "gpu" : undefined,
    levels: Number.isFinite(maxLevels.value) ? maxLevels.value : undefined,
    folded: folded.value.size ? [...folded.value] : undefined,
    group: pickedGroup.value ?? undefined,
    change: store.pickedChange.value ?? undefined,
    color: store.colorBy.value === store.colorings[0] ? undefined : store.colorBy.value,
  };
}

/** Apply a view; ignore the parts that do not exist in this trace. */
function applyView(session: Session, view: ViewState): void {
  session.compare(view.compare ?? null);
  // Indexes refer to the two compared steps; without these steps they are ignored.
  const places = Boolean(view.compare) === Boolean(session.compared.value) ? view : {};
  const store: Store = session.store.value;
  const { trace, bounds } = store;
  const { comparison } = trace;
  const rowCounts: Readonly<Record<string, number>> = {
    process: trace.processes.length,
    track: trace.tracks.length,
    counter: trace.counters.length,
  };
  const isRow = (key: string) => {
    const [type, index] = key.split(" ");
    return Number(index) < rowCounts[type];
  };
  const below = (index: number | undefined, count: number) => (index !== undefined && index < count ? index : null);
  batch(() => {
    if (places.viewport && overlapOf(places.viewport, bounds)) store.moveTo(places.viewport);
    else store.viewport.value = store.home;
    store.range.value = (places.range && overlapOf(places.range, bounds)) ?? null;
    store.selected.value = below(places.selected, trace.spans.count) ?? -1;
    store.tab.value = view.tab && store.tabs.includes(view.tab) ? view.tab : store.firstTab;
    store.query.value = view.query ?? "";
    store.groupBy(view.by ?? "module");
    store.pickedGroup.value = below(places.group, store.groups.value.groups.length);
    store.pickedChange.value = below(places.change, comparison?.changes.length ?? 0);
    store.colorBy.value = store.colorings.find((one) => one === view.color) ?? store.colorings[0];
    store.device.value = view.on && store.hasGpu ? view.on : "cpu";
    store.maxLevels.value = below(view.levels || undefined, store.deepest) ?? Infinity;
    store.folded.value = new Set(places.folded?.filter(isRow));
    if (store.selected.value >= 0) store.scrollRequests.value++;
  });
}

/** Write the view to the address: as a new entry of the history, or in the current one. */
function setAddress(view: string, isNewEntry: boolean): void {
  try {
    if (isNewEntry) history.pushState(null, "", `#${view}`);
    else history.replaceState(null, "", `#${view}`);
  } catch {
    // A frame without its own address cannot keep it, and browsers refuse too many changes at once.
  }
}

/**
 * Keep the address and the view the same. Panning and zooming replace the current entry of the history; other changes,
 * and a jump to a target, add a new one.
 *
 * @returns the cleanup function
 */
export function syncWithAddress(session: Session): () => void {
  let timer: ReturnType<typeof setTimeout> | undefined;
  let written = "";
  let writtenRest = "";
  const jumps = () => session.store.peek().jumps.peek();
  let writtenJumps = jumps();
  const rest = (view: ViewState) => encodeView({ ...view, viewport: undefined });
  const restore = () => {
    clearTimeout(timer);
    const { hash } = location;
    // A link to an element of the page is not a view.
    if (hash.length > 1 && !hash.includes("=")) return;
    applyView(session, decodeView(hash));
    const applied = readView(session);
    [written, writtenRest, writtenJumps] = [encodeView(applied), rest(applied), jumps()];
    if (hash.length > 1 && hash !== `#${written}`) setAddress(written, false);
  };
  const write = () => {
    const view = readView(session);
    const next = encodeView(view);
    if (next === written) return;
    const isNewEntry = rest(view) !== writtenRest || jumps() !== writtenJumps;
    [written, writtenRest, writtenJumps] = [next, rest(view), jumps()];
    setAddress(next, isNewEntry);
  };
  if (location.hash.length > 1) restore();
  else {
    const view = readView(session);
    [written, writtenRest] = [encodeView(view), rest(view)];
  }
  addEventListener("popstate", restore);
  const endEffect = effect(() => {
    void readView(session);
    clearTimeout(timer);
    timer = setTimeout(write, QUIET_MS);
  });
  return () => {
    endEffect();
    clearTimeout(timer);
    removeEventListener("popstate", restore);
  };
}
