/** Totals per module or class, sortable. */
import { type Signal, useComputed, useSignal } from "@preact/signals";

import { formatCount, formatDuration } from "../format";
import type { Store } from "../store";
import { computeTotals, type SortKey, sortTotals, type Total } from "../trace/totals";
import { Icon } from "./icons";
import { Scope } from "./scope";

/** Rows shown at first, and added by "more". */
const PAGE_ROWS = 200;
/** Percent of its column that the bar of a share of 100 % takes. */
const FULL_BAR = 60;

interface Column {
  readonly key: SortKey;
  readonly title: string;
  readonly format: (row: Total) => string;
}

const timeColumn = (key: "forward" | "backward" | "recompute" | "total" | "self", title: string): Column => ({
  key,
  title,
  format: (row) => (row[key] ? formatDuration(row[key]) : "–"),
});

const COLUMNS: readonly Column[] = [
  { key: "spans", title: "Spans", format: (row) => formatCount(row.spans) },
  timeColumn("forward", "Forward"),
  timeColumn("backward", "Backward"),
  timeColumn("recompute", "Recompute"),
  timeColumn("total", "Total"),
  timeColumn("self", "Self"),
];

const TEXT_KEYS: readonly SortKey[] = ["title", "moduleClass"];

interface Order {
  readonly key: SortKey;
  readonly descending: boolean;
}

interface ColumnHeadProps {
  readonly column: SortKey;
  readonly title: string;
  readonly order: Signal<Order>;
  readonly isNumber?: boolean;
}

function ColumnHead({ column, title, order, isNumber }: ColumnHeadProps) {
  const { key, descending } = order.value;
  const sorted = key === column;
  return (
    <th
      scope="col"
      class={isNumber ? "number" : ""}
      aria-sort={!sorted ? "none" : descending ? "descending" : "ascending"}
    >
      <button
        type="button"
        onClick={() => {
          order.value = { key: column, descending: sorted ? !descending : !TEXT_KEYS.includes(column) };
        }}
      >
        {title}
        {sorted && (
          <span class={descending ? "sort" : "sort up"}>
            <Icon name="down" />
          </span>
        )}
      </button>
    </th>
  );
}

function Share({ fraction }: { fraction: number | null }) {
  return (
    <td class="share">
      <span class="bar" style={{ width: `${Math.max(fraction ?? 0, 0) * FULL_BAR}%` }} />
      {fraction === null ? "–" : `${(fraction * 100).toFixed(1)} %`}
    </td>
  );
}

export function ModulesPanel({ store }: { store: Store }) {
  const order = useSignal<Order>({ key: "total", descending: true });
  const limit = useSignal(PAGE_ROWS);
  const rows = useComputed(() => computeTotals(store.trace, store.groups.value, store.device.value, store.range.value));
  const sorted = useComputed(() => sortTotals(rows.value, order.value.key, order.value.descending));

  const selfSum = rows.value.reduce((sum, row) => sum + row.self, 0);
  const byModule = store.grouping.value === "module";
  const hasRecompute = rows.value.some((row) => row.recompute);
  const columns = COLUMNS.filter((column) => column.key !== "recompute" || hasRecompute);

  return (
    <>
      <Scope store={store} />
      <table>
        <thead>
          <tr>
            <ColumnHead column="title" title={byModule ? "Module" : "Class"} order={order} />
            {byModule && <ColumnHead column="moduleClass" title="Class" order={order} />}
            {columns.map(({ key, title }) => (
              <ColumnHead key={key} column={key} title={title} order={order} isNumber />
            ))}
            <th scope="col" class="share">
              Share of self
            </th>
          </tr>
        </thead>
        <tbody>
          {sorted.value.slice(0, limit.value).map((row) => (
            <tr key={row.group}>
              <th scope="row">
                <span
                  class="color-swatch"
                  style={{ background: store.classColors.get(row.moduleClass || row.label)?.fill }}
                />
                <button
                  type="button"
                  class="link"
                  title="Select its first span"
                  onClick={() => store.select(row.first)}
                >
                  {row.title}
                </button>
              </th>
              {byModule && <td>{row.moduleClass}</td>}
              {columns.map((column) => (
                <td key={column.key} class="number">
                  {column.format(row)}
                </td>
              ))}
              <Share fraction={selfSum > 0 ? row.self / selfSum : null} />
            </tr>
          ))}
        </tbody>
      </table>
      {!rows.value.length && <p class="hint">No span lies in this range.</p>}
      {rows.value.length > limit.value && (
        <button
          type="button"
          class="more"
          onClick={() => {
            limit.value += PAGE_ROWS;
          }}
        >
          {formatCount(rows.value.length - limit.value)} more rows
        </button>
      )}
    </>
  );
}
