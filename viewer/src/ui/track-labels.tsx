/** The titles of the rows, which fold them. */
import { formatQuantity } from "../format";
import type { Row } from "../layout/rows";
import { maximumOf } from "../paint/counter-painter";
import type { Store } from "../store";
import { Icon } from "./icons";

function TrackLabel({ store, row }: { store: Store; row: Row }) {
  const counter = row.type === "counter" ? store.trace.counters[row.index] : undefined;
  return (
    <div
      class={`label ${row.type}`}
      data-row={row.key}
      data-kind={row.type === "track" ? store.trace.tracks[row.index].kind : row.type}
      style={{ top: `${row.top}px`, height: `${row.height}px` }}
    >
      <button type="button" aria-expanded={!row.folded} title={row.title} onClick={() => store.toggleFold(row.key)}>
        <Icon name={row.folded ? "next" : "down"} />
        <span>{row.title}</span>
      </button>
      {counter && !row.folded && <small>up to {formatQuantity(maximumOf(counter), counter.unit)}</small>}
    </div>
  );
}

export function TrackLabels({ store }: { store: Store }) {
  const rows = store.rows.value;
  const last = rows[rows.length - 1];
  return (
    <div class="labels" style={{ height: `${last ? last.top + last.height : 0}px` }}>
      {rows.map((row) => (
        <TrackLabel key={row.key} store={store} row={row} />
      ))}
    </div>
  );
}
