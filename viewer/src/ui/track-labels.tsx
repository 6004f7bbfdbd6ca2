/** The titles of the rows, which fold them. A process' title stays visible as long as any of its rows is. */
import { formatQuantity } from "../format";
import { type Row, rowsByProcess, rowsHeight } from "../layout/rows";
import type { Store } from "../store";
import { maximumOf } from "../trace/memory";
import { THREAD_KINDS } from "../trace/trace";
import { Icon } from "./icons";

/** Splits a title at its first `·`. The end of the second part distinguishes rows. */
function splitTitle(title: string): readonly [head: string, tail: string] {
  const at = title.indexOf(" · ");
  return at < 0 ? [title, ""] : [title.slice(0, at), title.slice(at + 3)];
}

function FoldButton({ store, row }: { store: Store; row: Row }) {
  const { tracks } = store.trace;
  const track = row.type === "track" && THREAD_KINDS.includes(tracks[row.index].kind) ? tracks[row.index] : undefined;
  // The name of a process' only thread has no information.
  const isOneOfSeveral = tracks.some(
    ({ kind, process, thread }) => process === track?.process && thread !== track.thread && THREAD_KINDS.includes(kind),
  );
  const [head, end] = track ? splitTitle(row.title) : [row.title, ""];
  const tail = isOneOfSeveral && end;
  return (
    <button
      type="button"
      aria-label={row.title}
      aria-expanded={!row.folded}
      title={row.title}
      onClick={() => store.toggleFold(row.key)}
    >
      <Icon name={row.folded ? "next" : "down"} />
      <span class={tail ? "kind" : ""}>{tail ? `${head} · ` : head}</span>
      {tail && (
        <span class="thread">
          <bdi>{tail}</bdi>
        </span>
      )}
    </button>
  );
}

/** @param groupTop start of the rows of its process, in CSS pixels from the top of all rows */
function TrackLabel({ store, row, groupTop }: { store: Store; row: Row; groupTop: number }) {
  const counter = row.type === "counter" ? store.trace.counters[row.index] : undefined;
  return (
    <div
      class={`label ${row.type}`}
      data-row={row.key}
      data-kind={row.type === "track" ? store.trace.tracks[row.index].kind : row.type}
      style={{ top: `${row.top - groupTop}px`, height: `${row.height}px` }}
    >
      <FoldButton store={store} row={row} />
      {counter && !row.folded && <small>up to {formatQuantity(maximumOf(counter), counter.unit)}</small>}
    </div>
  );
}

export function TrackLabels({ store }: { store: Store }) {
  const rows = store.rows.value;
  return (
    <div class="labels" style={{ height: `${rowsHeight(rows)}px`, "--header": `${store.metrics.value.header}px` }}>
      {rowsByProcess(rows).map(([header, ...members]) => (
        <div
          key={header.key}
          class="process-group"
          style={{ top: `${header.top}px`, height: `${rowsHeight([header, ...members]) - header.top}px` }}
        >
          <div class="label process" data-row={header.key} data-kind="process" style={{ height: `${header.height}px` }}>
            <FoldButton store={store} row={header} />
          </div>
          {members.map((row) => (
            <TrackLabel key={row.key} store={store} row={row} groupTop={header.top} />
          ))}
        </div>
      ))}
    </div>
  );
}
