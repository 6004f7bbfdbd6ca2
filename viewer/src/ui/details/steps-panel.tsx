/** The training steps and what they took; two of them are chosen to be shown side by side. */
import { useComputed, useSignal } from "@preact/signals";

import { percentile } from "../../analysis/call-stats";
import { formatCount, formatDuration } from "../../format";
import { durationOf } from "../../layout/viewport";
import type { Session } from "../../session";
import type { Store } from "../../store";
import { ColumnHead, type Order } from "./column-head";

/** Rows shown at first, and added by "more". */
const PAGE_ROWS = 200;

type Key = "number" | "duration";

/** The step nearest the median, and the slowest; the two first where these are one. */
function usualAndSlowest(durations: readonly number[], median: number): readonly [number, number] {
  const indexes = [...durations.keys()];
  const usual = indexes.reduce((best, i) =>
    Math.abs(durations[i] - median) < Math.abs(durations[best] - median) ? i : best,
  );
  const slowest = indexes.reduce((best, i) => (durations[i] > durations[best] ? i : best));
  return usual === slowest ? [0, 1] : [usual, slowest];
}

export function StepsPanel({ store, session }: { store: Store; session: Session }) {
  const { steps } = store;
  const durations = steps.map(durationOf);
  const median = percentile(Float64Array.from(durations).sort(), 50);
  const [usual, slowest] = usualAndSlowest(durations, median);
  const first = useSignal(usual);
  const second = useSignal(slowest);
  const order = useSignal<Order<Key>>({ key: "number", descending: false });
  const limit = useSignal(PAGE_ROWS);
  const shown = useComputed(() => {
    const { key, descending } = order.value;
    const sign = descending ? -1 : 1;
    return [...steps.keys()].sort((a, b) => sign * (key === "duration" ? durations[a] - durations[b] : a - b) || a - b);
  });
  const radio = (chosen: typeof first, index: number, label: string) => (
    <td class="number">
      <input
        type="radio"
        name={label}
        aria-label={`${steps[index].name}: ${label}`}
        checked={chosen.value === index}
        onChange={() => {
          chosen.value = index;
        }}
      />
    </td>
  );
  return (
    <>
      <div class="scope">
        <p>
          {formatCount(steps.length)} steps, median {formatDuration(median)}
        </p>
        <button
          type="button"
          class="more compare"
          disabled={first.value === second.value}
          onClick={() => session.compare([first.value, second.value])}
        >
          Compare {steps[first.value].name} with {steps[second.value].name}
        </button>
      </div>
      <table class="steps-table">
        <thead>
          <tr>
            <ColumnHead column="number" title="Step" order={order} />
            <ColumnHead column="duration" title="Duration" order={order} isNumber />
            <th scope="col" class="number">
              % of median
            </th>
            <th scope="col" class="number">
              First
            </th>
            <th scope="col" class="number">
              Second
            </th>
          </tr>
        </thead>
        <tbody>
          {shown.value.slice(0, limit.value).map((index) => (
            <tr key={index}>
              <th scope="row">
                <button type="button" class="link" title="Zoom to this step" onClick={() => store.toStep(index)}>
                  {steps[index].name}
                </button>
              </th>
              <td class="number">{formatDuration(durations[index])}</td>
              <td class="number">{((durations[index] / median) * 100).toFixed(1)} %</td>
              {radio(first, index, "first")}
              {radio(second, index, "second")}
            </tr>
          ))}
        </tbody>
      </table>
      {steps.length > limit.value && (
        <button
          type="button"
          class="more"
          onClick={() => {
            limit.value += PAGE_ROWS;
          }}
        >
          {formatCount(steps.length - limit.value)} more rows
        </button>
      )}
    </>
  );
}
