/** The recording as a whole: its losses, its contents, its origin. */

import { reportLosses } from "../../analysis/loss-report";
import { formatCount, formatMoment, formatQuantity, visibleText } from "../../format";
import type { Session } from "../../session";
import type { Store } from "../../store";

const formatMetadata = (value: unknown): string =>
  visibleText(typeof value === "string" ? value : JSON.stringify(value).replace(/["{}]/g, "").replace(/[:,]/g, "$& "));

/** Meanings of a recording's statistics, which cover the whole recording, not only the visible part. */
const STAT_MEANINGS: Readonly<Record<string, string>> = {
  recorded: "events: starts and ends of calls and of autograd nodes, steps, marks, samples",
  overwritten: "the oldest events, which newer ones replaced; a larger capacity keeps more",
  torn: "events that were half written when the recording was read, or when its process died",
  unfinished: "spans that had not ended when the recording did",
  unstarted: "spans whose start was overwritten",
  unattributed: "runs of autograd nodes outside all modules, as those of a loss function: no loss, and not shown",
};

/** Select the next incomplete span after the selected one, wrapping around. */
function selectNextIncomplete({ trace, selected, select }: Store): void {
  const { spans } = trace;
  for (let i = 1; i <= spans.count; i++) {
    const span = (selected.value + i + spans.count) % spans.count;
    if (!spans.complete[span]) {
      select(span);
      return;
    }
  }
}

/** The holders of memory at its peak, the cause of a failed allocation, and the growing modules. */
function HoldersTable({ store }: { store: Store }) {
  const { holders, metadata } = store.trace;
  if (!holders) return null;
  const { sentences = [] } = (metadata.memory ?? {}) as { sentences?: string[] };
  const whole = holders.rows.reduce((sum, [, bytes]) => sum + bytes, 0);
  return (
    <>
      <h2 class="selection-title">
        Held at the peak: {formatQuantity(whole, "bytes")} at {formatMoment(holders.time)}
      </h2>
      {sentences.map((sentence) => (
        <p key={sentence} class="note">
          {visibleText(sentence)}
        </p>
      ))}
      <table class="holders">
        <thead>
          <tr>
            <th scope="col">Module</th>
            <th scope="col" class="number">
              Held
            </th>
            <th scope="col" class="number">
              % peak
            </th>
          </tr>
        </thead>
        <tbody>
          {holders.rows.map(([fqn, bytes], i) => (
            <tr key={i}>
              <th scope="row">{fqn}</th>
              <td class="number">{formatQuantity(bytes, "bytes")}</td>
              <td class="number">{((bytes / whole) * 100).toFixed(1)} %</td>
            </tr>
          ))}
        </tbody>
      </table>
      <p class="hint">other: held before the step, or by no module</p>
    </>
  );
}

export function RecordingPanel({ store, session }: { store: Store; session: Session }) {
  const { metadata, base, processes, comparison, holders } = store.trace;
  // A comparison of recordings has no statistics.
  const isOfRecordings = comparison !== null && session.compared.value === null;
  const stats = isOfRecordings ? {} : store.trace.stats;
  const losses = reportLosses(store.trace);
  const fields: [string, string][] = [
    ["processes", processes.map((process) => `${process.name} (pid ${process.pid})`).join(", ")],
    ...(comparison
      ? []
      : [["time 0", `${new Date(Number(base / 1_000_000n)).toISOString()} (Unix ${base} ns)`] as [string, string]]),
    ...Object.entries(metadata)
      .filter(([key, value]) => value !== null && !(key === "memory" && holders))
      .map(([key, value]): [string, string] => [visibleText(key), formatMetadata(value)]),
  ];
  return (
    <>
      {losses.length ? (
        <div class="loss-notice">
          <h2>Not everything is here</h2>
          <ul>
            {losses.map((sentence) => (
              <li key={sentence}>{sentence}</li>
            ))}
          </ul>
          {store.trace.spans.complete.includes(0) && (
            <button type="button" class="more" onClick={() => selectNextIncomplete(store)}>
              Show the next incomplete span
            </button>
          )}
        </div>
      ) : (
        !isOfRecordings && <p class="hint">Nothing was lost in this recording.</p>
      )}
      {!store.trace.findings.length && <p class="hint">{store.trace.findingsEnd}</p>}
      <dl class="fields">
        {Object.entries(stats).map(([key, value]) => (
          <div class="field" key={key}>
            <dt>{key}</dt>
            <dd>
              {formatCount(value)}
              {STAT_MEANINGS[key] && <small>{STAT_MEANINGS[key]}</small>}
            </dd>
          </div>
        ))}
        {fields.map(([key, value]) => (
          <div class="field" key={key}>
            <dt>{key}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
      <HoldersTable store={store} />
    </>
  );
}
