/** Totals per module or class: sorted by any column, filtered by the search, copied as a table. */

import { useComputed, useSignal } from "@preact/signals";
import { Fragment } from "preact";
import { type DeviceTime, deviceTimes } from "../../analysis/device-times";
import { flaggedSpans } from "../../analysis/search";
import { computeTotals, type SortKey, sortTotals, type Total, timeOfSteps } from "../../analysis/totals";
import { colorKey } from "../../color";
import { formatCount, formatDuration } from "../../format";
import { durationOf } from "../../layout/viewport";
import type { Store } from "../../store";
import { hasDeviceTimes } from "../../trace/trace";
import { CopyButton } from "../copy-button";
import { CallStatsCard } from "./call-stats-card";
import { ColorChoice } from "./color-choice";
import { ColumnHead, type Order } from "./column-head";
import { MoreRows, PAGE_ROWS } from "./more-rows";
import { Scope } from "./scope";

/** Width of the bar for 100 %, in percent of its column. */
const FULL_BAR = 60;

/** Device times are shown beside thread times. */
type Key = SortKey | keyof DeviceTime;
type Row = Total & DeviceTime;

interface Column {
  readonly key: Key;
  readonly title: string;
  /** The meaning of the column, shown at its head. */
  readonly hint?: string;
  /** The column shows another column in percent, and sorts like it. */
  readonly isShare?: boolean;
  /** @param wholeNs the time that counts as 100 % */
  readonly format: (row: Row, wholeNs: number) => string;
}

const formatShare = (ns: number, wholeNs: number): string =>
  wholeNs > 0 ? `${((ns / wholeNs) * 100).toFixed(1)} %` : "–";

const timeColumn = (
  key: "forward" | "backward" | "recompute" | "total" | "self" | "gpu" | "latency",
  title: string,
  hint: string,
): Column => ({
  key,
  title,
  hint,
  format: (row) => (row[key] ? formatDuration(row[key]) : "–"),
});

const COLUMNS: readonly Column[] = [
  {
    key: "calls",
    title: "Calls",
    hint: "In forward, as modtrace summary has them",
    format: (row) => formatCount(row.calls),
  },
  { key: "total", title: "%", isShare: true, format: (row, wholeNs) => formatShare(row.total, wholeNs) },
  timeColumn("total", "Total", "Forward, backward and recompute together, as modtrace summary has them"),
  timeColumn("self", "Self", "In all phases together, outside the modules inside"),
  timeColumn("forward", "Forward", "In forward, with the modules inside"),
  timeColumn("backward", "Backward", "In backward, with the modules inside, without what was recomputed meanwhile"),
  timeColumn(
    "recompute",
    "Recompute",
    "Forward run again for activation checkpoints, in the backward of whichever module: counted to the module that runs " +
      "again and to those that contain it",
  ),
];

const DEVICE_COLUMNS: readonly Column[] = [
  timeColumn(
    "gpu",
    "GPU time",
    "In which a stream was in it, in all phases together, with what it waited for the host",
  ),
  {
    key: "share",
    title: "% GPU",
    hint: "Of the time from the first begin to the last end of each stream",
    format: (row) => (row.gpu ? formatShare(row.share, 1) : "–"),
  },
  timeColumn("latency", "Latency", "From its begin on a thread until a stream came by: the median of its calls"),
];

const NO_DEVICE_TIME: DeviceTime = { gpu: 0, share: 0, latency: 0 };

/** The time that counts as 100 %, equal to that of `modtrace summary`; its name, and its description. */
function wholeOf({ trace, steps, range }: Store, rows: readonly Row[]): readonly [number, string, string] {
  if (range.value) return [durationOf(range.value), "range", "the selected range"];
  const stepsNs = timeOfSteps(trace, steps);
  if (stepsNs) return [stepsNs, "step", "the time of all steps; above 100 where threads ran at once"];
  return [rows.reduce((sum, row) => sum + row.self, 0), "total", "what all rows take"];
}

function SelfShare({ ns, wholeNs }: { ns: number; wholeNs: number }) {
  const fraction = wholeNs > 0 ? Math.min(Math.max(ns / wholeNs, 0), 1) : 0;
  return (
    <td class="share">
      <span class="bar" style={{ width: `${fraction * FULL_BAR}%` }} />
      {formatShare(ns, wholeNs)}
    </td>
  );
}

/** The rows as tab-separated text with a line of titles; times in nanoseconds. */
function toText(rows: readonly Row[], columns: readonly Column[]): string {
  const keys = [...new Set(columns.map(({ key }) => key))].filter((key) => key !== "share");
  const title = (key: Key) => (key === "calls" ? key : `${key} ns`);
  const lines = rows.map((row) => [row.title, row.moduleClass, ...keys.map((key) => String(row[key]))].join("\t"));
  return [["name", "class", ...keys.map(title)].join("\t"), ...lines].join("\n");
}

export function ModulesPanel({ store }: { store: Store }) {
  const order = useSignal<Order<Key>>({ key: "total", descending: true });
  const limit = useSignal(PAGE_ROWS);
  const hasDevice = useComputed(() => store.device.value === "cpu" && hasDeviceTimes(store.trace));
  const rows = useComputed((): Row[] => {
    const { trace, groups, device, range } = store;
    const onDevice = hasDevice.value ? deviceTimes(trace, groups.value, range.value) : null;
    const totals = computeTotals(trace, groups.value, device.value, range.value);
    return totals.map((row) => ({ ...row, ...(onDevice?.get(row.group) ?? NO_DEVICE_TIME) }));
  });
  /** Groups with a span that matches the search; null without a search. */
  const searched = useComputed(() => {
    const { flags } = store.search.value;
    if (!flags) return null;
    const { ofName } = store.groups.value;
    return new Set(Array.from(flaggedSpans(flags), (span) => ofName[store.trace.spans.name[span]]));
  });
  const sorted = useComputed(() => {
    const shown = rows.value.filter(({ group }) => searched.value?.has(group) ?? true);
    return sortTotals(shown, order.value.key, order.value.descending);
  });

  const [wholeNs, whole, wholeHint] = wholeOf(store, rows.value);
  const picked = store.pickedGroup.value;
  const byModule = store.grouping.value === "module";
  const hasRecompute = rows.value.some((row) => row.recompute);
  const columns = [
    ...COLUMNS.filter((column) => column.key !== "recompute" || hasRecompute),
    ...(hasDevice.value ? DEVICE_COLUMNS : []),
  ];

  return (
    <>
      <Scope store={store}>
        <CopyButton text={() => toText(sorted.value, columns)} label="Copy table" />
      </Scope>
      {store.colorings.length > 1 && (
        <div class="scope">
          <ColorChoice store={store} />
        </div>
      )}
      <table>
        <thead>
          <tr>
            <ColumnHead column="title" title={byModule ? "Module" : "Class"} order={order} />
            {byModule && <ColumnHead column="moduleClass" title="Class" order={order} class="module-class" />}
            {columns.map(({ key, title, hint, isShare }) =>
              isShare ? (
                <th key={title} scope="col" class="number" title={`Total as a part of ${wholeHint}`}>
                  % {whole}
                </th>
              ) : (
                <ColumnHead key={title} column={key} title={title} hint={hint} order={order} isNumber />
              ),
            )}
            <th scope="col" class="share" title={`Self as a part of ${wholeHint}`}>
              % self
            </th>
          </tr>
        </thead>
        <tbody>
          {sorted.value.slice(0, limit.value).map((row) => (
            <Fragment key={row.group}>
              <tr class={row.group === picked ? "picked" : ""}>
                <th scope="row">
                  <span class="color-swatch" style={{ background: store.classColors.get(colorKey(row))?.fill }} />
                  <button
                    type="button"
                    class="link"
                    title={`${row.title}: highlight its spans and show its calls`}
                    aria-pressed={row.group === picked}
                    onClick={() => store.pickGroup(row.group)}
                  >
                    <bdi>{row.title}</bdi>
                  </button>
                </th>
                {byModule && <td class="module-class">{row.moduleClass}</td>}
                {columns.map((column) => (
                  <td key={column.title} class="number">
                    {column.format(row, wholeNs)}
                  </td>
                ))}
                <SelfShare ns={row.self} wholeNs={wholeNs} />
              </tr>
              {row.group === picked && (
                <tr class="row-details">
                  <td colSpan={columns.length + (byModule ? 3 : 2)}>
                    <CallStatsCard store={store} group={row.group} />
                  </td>
                </tr>
              )}
            </Fragment>
          ))}
        </tbody>
      </table>
      {!rows.value.length && <p class="hint">No span lies in this range.</p>}
      {!!rows.value.length && !sorted.value.length && <p class="hint">The search matches none of these.</p>}
      <MoreRows count={sorted.value.length} limit={limit} />
    </>
  );
}
