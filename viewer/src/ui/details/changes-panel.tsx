/** The time of each module on both sides, and the difference: sorted by any column, filtered by the search, copied. */
import { useComputed, useSignal } from "@preact/signals";

import { flaggedSpans } from "../../analysis/search";
import { type Color, colorOfChange, RAN_OTHERWISE, VERDICT_COLORS } from "../../color";
import { compareValues, formatCount } from "../../format";
import type { Store } from "../../store";
import { type Change, ranOtherwise, ratioOf, VERDICTS, type Verdict } from "../../trace/comparison";
import { CopyButton } from "../copy-button";
import { ColorChoice } from "./color-choice";
import { ColumnHead, type Order } from "./column-head";
import { MoreRows, PAGE_ROWS } from "./more-rows";

type Key = "cost" | "fqn" | "phase" | "before" | "after" | "difference" | "ratio" | "calls" | "verdict";

const VALUE: Readonly<Record<Exclude<Key, "cost">, (change: Change) => number | string>> = {
  fqn: ({ fqn }) => fqn,
  phase: ({ phase }) => phase,
  before: ({ before }) => before,
  after: ({ after }) => after,
  difference: ({ difference }) => difference,
  ratio: ratioOf,
  calls: ({ callsAfter }) => callsAfter,
  verdict: ({ verdict }) => VERDICTS.indexOf(verdict),
};

const formatMs = (ns: number): string => (ns / 1e6).toFixed(3);
/** The value with its sign, unless it is shown as 0. */
function signed(value: number, digits: number): string {
  const text = Math.abs(value).toFixed(digits);
  return `${Number(text) === 0 ? "" : value < 0 ? "−" : "+"}${text}`;
}
const signedMs = (ns: number): string => signed(ns / 1e6, 3);

function formatRatio(change: Change): string {
  const ratio = ratioOf(change);
  if (ratio > 10 && Number.isFinite(ratio)) return `${formatCount(Math.round(ratio + 1))} times as long`;
  return Number.isFinite(ratio) ? `${signed(ratio * 100, 1)} %` : "–";
}

const formatCalls = ({ callsBefore, callsAfter }: Change): string =>
  callsBefore === callsAfter ? formatCount(callsAfter) : `${formatCount(callsBefore)} → ${formatCount(callsAfter)}`;

/** The text of a verdict for sides with these names. */
function verdictTitle(verdict: Verdict, [before, after]: readonly [string, string]): string {
  if (verdict === "added") return `only ${after}`;
  return verdict === "removed" ? `only ${before}` : verdict;
}

/** The rows as tab-separated text with a line of titles; times in nanoseconds. */
function toText(changes: readonly Change[], [before, after]: readonly [string, string]): string {
  const columns: readonly (readonly [string, (change: Change) => number | string])[] = [
    ["module", ({ fqn }) => fqn],
    ["phase", ({ phase }) => phase],
    [`${before} ns`, (change) => change.before],
    [`${after} ns`, (change) => change.after],
    ["difference ns", ({ difference }) => difference],
    ["low ns", ({ interval }) => interval?.[0] ?? ""],
    ["high ns", ({ interval }) => interval?.[1] ?? ""],
    [`${before} calls`, ({ callsBefore }) => callsBefore],
    [`${after} calls`, ({ callsAfter }) => callsAfter],
    ["verdict", (change) => ranOtherwise(change) || change.verdict],
  ];
  const lines = changes.map((change) => columns.map(([, value]) => value(change)).join("\t"));
  return [columns.map(([title]) => title).join("\t"), ...lines].join("\n");
}

function Swatch({ color }: { color: Color }) {
  return <span class="color-swatch" style={{ background: color.fill }} />;
}

export function ChangesPanel({ store }: { store: Store }) {
  const { changes, titles, notes, ofSpan } = store.trace.comparison!;
  const order = useSignal<Order<Key>>({ key: "cost", descending: true });
  const limit = useSignal(PAGE_ROWS);
  const shown = useComputed(() => {
    const { flags } = store.search.value;
    const found = flags && new Set(Array.from(flaggedSpans(flags), (span) => ofSpan[span]));
    const rows = [...changes.keys()].filter((index) => found?.has(index) ?? true);
    const { key, descending } = order.value;
    if (key === "cost") return rows;
    const sign = descending ? -1 : 1;
    const value = (index: number) => VALUE[key](changes[index]);
    return rows.sort((a, b) => sign * compareValues(value(a), value(b)) || a - b);
  });
  const hasOtherCalls = changes.some(({ callsBefore, callsAfter }) => callsBefore !== callsAfter);
  const hasInterval = changes.some(({ interval }) => interval);
  const picked = store.pickedChange.value;
  const counts = VERDICTS.map(
    (verdict) => changes.filter((change) => change.verdict === verdict && !ranOtherwise(change)).length,
  );
  const otherwise = changes.filter(ranOtherwise).length;

  return (
    <>
      <div class="notes">
        {notes.map((note) => (
          <p key={note}>{note}</p>
        ))}
      </div>
      <div class="scope">
        <ColorChoice store={store} />
        <p class="verdicts">
          {VERDICTS.map(
            (verdict, i) =>
              counts[i] > 0 && (
                <span key={verdict}>
                  <Swatch color={VERDICT_COLORS[verdict]} />
                  {formatCount(counts[i])} {verdictTitle(verdict, titles)}
                </span>
              ),
          )}
          {otherwise > 0 && (
            <span>
              <Swatch color={RAN_OTHERWISE} />
              {formatCount(otherwise)} ran more or less often
            </span>
          )}
        </p>
        <CopyButton
          text={() =>
            toText(
              shown.value.map((index) => changes[index]),
              titles,
            )
          }
          label="Copy table"
        />
      </div>
      <table>
        <thead>
          <tr>
            <ColumnHead column="fqn" title="Module" order={order} />
            <ColumnHead column="phase" title="Phase" order={order} />
            <ColumnHead column="before" title={`${titles[0]} ms`} order={order} isNumber />
            <ColumnHead column="after" title={`${titles[1]} ms`} order={order} isNumber />
            <ColumnHead column="difference" title="Difference" order={order} isNumber />
            <ColumnHead column="ratio" title="%" order={order} isNumber />
            {hasInterval && (
              <th scope="col" class="number interval">
                99 % interval ms
              </th>
            )}
            {hasOtherCalls && <ColumnHead column="calls" title="Calls" order={order} isNumber />}
            <ColumnHead column="verdict" title="Verdict" order={order} />
          </tr>
        </thead>
        <tbody>
          {shown.value.slice(0, limit.value).map((index) => {
            const change = changes[index];
            const { fqn, phase, before, after, difference, interval, verdict } = change;
            return (
              <tr key={index} class={index === picked ? "picked" : ""}>
                <th scope="row">
                  <Swatch color={colorOfChange(change)} />
                  <button
                    type="button"
                    class="link"
                    title={`${fqn}: highlight its spans on both sides`}
                    aria-pressed={index === picked}
                    onClick={() => store.pickChange(index)}
                  >
                    <bdi>{fqn}</bdi>
                  </button>
                </th>
                <td>{phase}</td>
                <td class="number">{formatMs(before)}</td>
                <td class="number">{formatMs(after)}</td>
                <td class="number">{signedMs(difference)}</td>
                <td class="number">{formatRatio(change)}</td>
                {hasInterval && (
                  <td class="number interval">{interval && `${signedMs(interval[0])} … ${signedMs(interval[1])}`}</td>
                )}
                {hasOtherCalls && <td class="number">{formatCalls(change)}</td>}
                <td class="verdict">{ranOtherwise(change) || verdictTitle(verdict, titles)}</td>
              </tr>
            );
          })}
        </tbody>
      </table>
      {!shown.value.length && <p class="hint">The search matches none of these.</p>}
      <MoreRows count={shown.value.length} limit={limit} />
    </>
  );
}
