/** The training steps and their times; the user can choose two of them to see them side by side. */
import { useComputed, useSignal } from "@preact/signals";

import { type StepDeviceTime, stepDeviceTimes } from "../../analysis/device-times";
import { formatCount, formatDuration } from "../../format";
import { durationOf } from "../../layout/viewport";
import type { Session } from "../../session";
import type { Store } from "../../store";
import { STEP_PARTS, type StepPart, stepTimesOf } from "../../trace/step-times";
import { medianDuration, STEP_PROCESS } from "../../trace/steps";
import { hasDeviceTimes, isOnThread, type Trace } from "../../trace/trace";
import { ColumnHead, type Order } from "./column-head";
import { MoreRows, PAGE_ROWS } from "./more-rows";

type Key = "number" | "duration" | StepPart | keyof StepDeviceTime;

const PART_HINTS: Readonly<Record<StepPart, string>> = {
  forward: "In forward of any module",
  backward: "In backward of any module, without recompute",
  recompute: "Forward run again for activation checkpoints",
  before: "Before its first span: loading a batch, and what else comes first",
  between: "Between its spans: the loss, and the loop around the model",
  after: "Behind its last span: the optimizer, and what else is done until the step ends",
};

const titleOf = (part: StepPart): string => part[0].toUpperCase() + part.slice(1);

/** The step nearest the median, and the slowest; if both are the same, the first two steps. */
function usualAndSlowest(durations: readonly number[], median: number): readonly [number, number] {
  const indexes = [...durations.keys()];
  const usual = indexes.reduce((best, i) =>
    Math.abs(durations[i] - median) < Math.abs(durations[best] - median) ? i : best,
  );
  const slowest = indexes.reduce((best, i) => (durations[i] > durations[best] ? i : best));
  return usual === slowest ? [0, 1] : [usual, slowest];
}

/** The process of the steps, if the recording has several processes; otherwise empty. */
function processNote({ tracks, processes }: Trace): string {
  if (!tracks.some((track) => track.process !== STEP_PROCESS && isOnThread(track))) return "";
  const { rank, name } = processes[STEP_PROCESS];
  return rank === null ? `steps of ${name}` : `steps of rank ${rank}; modtrace ranks slow compares ranks`;
}

export function StepsPanel({ store, session }: { store: Store; session: Session }) {
  const { steps } = store;
  const durations = steps.map(durationOf);
  const wholeCount = steps.filter(({ isWhole }) => isWhole).length;
  const note = processNote(store.trace);
  const times = useComputed(() => stepTimesOf(store.trace, steps));
  const onDevice = useComputed(() => (hasDeviceTimes(store.trace) ? stepDeviceTimes(store.trace, steps) : null));
  const parts = STEP_PARTS.filter((part) => part !== "recompute" || times.value.some((step) => step.recompute));
  const median = medianDuration(steps);
  const [usual, slowest] = usualAndSlowest(durations, median);
  const first = useSignal(usual);
  const second = useSignal(slowest);
  const order = useSignal<Order<Key>>({ key: "number", descending: false });
  const limit = useSignal(PAGE_ROWS);
  const shown = useComputed(() => {
    const { key, descending } = order.value;
    const sign = descending ? -1 : 1;
    const value = (index: number) => {
      if (key === "number") return index;
      if (key === "busy" || key === "gap") return onDevice.value![index][key];
      return key === "duration" ? durations[index] : times.value[index][key];
    };
    return [...steps.keys()].sort((a, b) => sign * (value(a) - value(b)) || a - b);
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
          {formatCount(steps.length)} steps, {wholeCount < steps.length && `${formatCount(wholeCount)} whole, `}
          median {formatDuration(median)}
        </p>
        {note && <p>{note}</p>}
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
            {parts.map((part) => (
              <ColumnHead
                key={part}
                column={part}
                title={titleOf(part)}
                hint={PART_HINTS[part]}
                order={order}
                isNumber
              />
            ))}
            {onDevice.value && (
              <>
                <ColumnHead
                  column="busy"
                  title="% GPU"
                  hint="Of the step, in which a stream was in a module"
                  order={order}
                  isNumber
                />
                <ColumnHead
                  column="gap"
                  title="GPU gap"
                  hint="The longest time of the step in which no stream was in a module"
                  order={order}
                  isNumber
                />
              </>
            )}
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
                  <bdi>{steps[index].name}</bdi>
                </button>
              </th>
              <td class="number">{formatDuration(durations[index])}</td>
              <td class="number">{((durations[index] / median) * 100).toFixed(1)} %</td>
              {parts.map((part) => (
                <td key={part} class="number">
                  {times.value[index][part] ? formatDuration(times.value[index][part]) : "–"}
                </td>
              ))}
              {onDevice.value && (
                <>
                  <td class="number">{(onDevice.value[index].busy * 100).toFixed(1)} %</td>
                  <td class="number">{formatDuration(onDevice.value[index].gap)}</td>
                </>
              )}
              {radio(first, index, "first")}
              {radio(second, index, "second")}
            </tr>
          ))}
        </tbody>
      </table>
      <MoreRows count={steps.length} limit={limit} />
    </>
  );
}
