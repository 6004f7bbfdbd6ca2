/** Totals per module or class, sortable. */
import { useComputed, useSignal } from "@preact/signals";

import { type SortKey, sorted, type Total, totals } from "../aggregate";
import type { Store } from "../store";
import { formatCount, formatDuration } from "../text";
import { Icon } from "./icons";
import { Scope } from "./scope";

/** Rows shown at first, and added by "more". */
const PAGE = 200;

interface Column {
  readonly key: SortKey;
  readonly title: string;
  readonly show: (row: Total) => string;
}

const time = (key: "forward" | "backward" | "recompute" | "total" | "self", title: string): Column => ({
  key,
  title,
  show: (row) => (row[key] ? formatDuration(row[key]) : "–"),
});

const COLUMNS: readonly Column[] = [
  { key: "slices", title: "Slices", show: (row) => formatCount(row.slices) },
  time("forward", "Forward"),
  time("backward", "Backward"),
  time("recompute", "Recompute"),
  time("total", "Total"),
  time("self", "Self"),
];

const TEXT_KEYS: readonly SortKey[] = ["title", "moduleClass"];

export function Modules({ store }: { store: Store }) {
  const key = useSignal<SortKey>("total");
  const descending = useSignal(true);
  const limit = useSignal(PAGE);
  const rows = useComputed(() => totals(store.trace, store.groups.value, store.device.value, store.range.value));
  const ordered = useComputed(() => sorted(rows.value, key.value, descending.value));

  const all = rows.value.reduce((sum, row) => sum + row.self, 0);
  const byModule = store.grouping.value === "module";
  const recompute = rows.value.some((row) => row.recompute);
  const columns = COLUMNS.filter((column) => column.key !== "recompute" || recompute);

  const Head = ({ column, title, number }: { column: SortKey; title: string; number?: boolean }) => (
    <th scope="col" class={number ? "number" : ""} aria-sort={key.value !== column ? "none" : descending.value ? "descending" : "ascending"}>
      <button
        type="button"
        onClick={() => {
          descending.value = key.value === column ? !descending.value : !TEXT_KEYS.includes(column);
          key.value = column;
        }}
      >
        {title}
        {key.value === column && <span class={descending.value ? "sort" : "sort up"}><Icon name="down" /></span>}
      </button>
    </th>
  );

  return (
    <>
      <Scope store={store} />
      <table>
        <thead>
          <tr>
            {Head({ column: "title", title: byModule ? "Module" : "Class" })}
            {byModule && Head({ column: "moduleClass", title: "Class" })}
            {columns.map((column) => Head({ column: column.key, title: column.title, number: true }))}
            <th scope="col" class="share">Share of self</th>
          </tr>
        </thead>
        <tbody>
          {ordered.value.slice(0, limit.value).map((row) => (
            <tr key={row.group}>
              <th scope="row">
                <span class="swatch" style={{ background: store.colors.get(row.moduleClass || row.label)?.fill }} />
                <button type="button" class="link" title="Select its first slice" onClick={() => store.select(row.first)}>
                  {row.title}
                </button>
              </th>
              {byModule && <td>{row.moduleClass}</td>}
              {columns.map((column) => (
                <td key={column.key} class="number">{column.show(row)}</td>
              ))}
              <td class="share">
                <span class="bar" style={{ width: `${all > 0 ? Math.max((row.self / all) * 100, 0) * 0.6 : 0}%` }} />
                {all > 0 ? `${((row.self / all) * 100).toFixed(1)} %` : "–"}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
      {!rows.value.length && <p class="hint">No slice lies in this range.</p>}
      {rows.value.length > limit.value && (
        <button
          type="button"
          class="more"
          onClick={() => {
            limit.value += PAGE;
          }}
        >
          {formatCount(rows.value.length - limit.value)} more rows
        </button>
      )}
    </>
  );
}
