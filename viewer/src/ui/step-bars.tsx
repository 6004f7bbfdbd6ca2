/** A stacked bar per step, with a colour for each part of its time, and the legend of the parts. */
import { effect, useSignal } from "@preact/signals";
import { useEffect, useLayoutEffect, useMemo, useRef } from "preact/hooks";

import { partColor } from "../color";
import { formatDuration } from "../format";
import { barOfStep, barPitch, barsOf, fullHeightNs, MAX_BAR_PX, type StepBar } from "../layout/step-bars";
import { durationOf } from "../layout/viewport";
import { paintStepBars } from "../paint/step-bars";
import { oncePerFrame, prepareSurface } from "../paint/surface";
import type { Store } from "../store";
import { readCanvasColors, theme } from "../theme";
import { longestParts, partsOfStep, type StepParts } from "../trace/step-parts";
import { shownStep } from "../trace/steps";
import { type Hover, Tooltip } from "./tooltip";

/** Number of bars that a key moves by. */
const KEY_STEPS: Readonly<Record<string, number>> = {
  ArrowLeft: -1,
  ArrowRight: 1,
  PageUp: -10,
  PageDown: 10,
  Home: -Infinity,
  End: Infinity,
};

function titleOf({ steps }: StepParts, { first, last, slowest }: StepBar): string {
  const { name } = steps[slowest];
  const title = `${name} · ${formatDuration(durationOf(steps[slowest]))}`;
  return first === last ? title : `${title}, the slowest from ${steps[first].name} to ${steps[last].name}`;
}

/** The text of a bar: the step, why it was slow, and its parts in ms. */
function describeBar(stepParts: StepParts, bar: StepBar): Omit<Hover, "x" | "y"> {
  const ns = partsOfStep(stepParts, bar.slowest);
  const rows = longestParts(stepParts, bar.slowest).map((part) => ({
    color: partColor(stepParts.parts[part].name).fill,
    name: stepParts.parts[part].name,
    value: `${(ns[part] / 1e6).toFixed(3)} ms`,
  }));
  return { span: -1, title: titleOf(stepParts, bar), detail: stepParts.causes[bar.slowest] ?? "", rows };
}

function Legend({ parts }: StepParts) {
  const used = parts.filter(({ share }) => share > 0);
  return (
    <ul class="part-legend" aria-label="Parts of the steps">
      {used.map(({ name, share }) => (
        <li key={name}>
          <span class="color-swatch" style={{ background: partColor(name).fill }} />
          <bdi>{name}</bdi> <span class="part-share">{(share * 100).toFixed(1)} %</span>
        </li>
      ))}
    </ul>
  );
}

function Bars({ store, stepParts }: { store: Store; stepParts: StepParts }) {
  const { steps } = stepParts;
  const canvas = useRef<HTMLCanvasElement>(null);
  const width = useSignal(0);
  const active = useSignal(-1);
  const hover = useSignal<Hover | null>(null);
  const durations = useMemo(() => steps.map(durationOf), [stepParts]);
  const fullNs = useMemo(() => fullHeightNs(durations), [durations]);
  const bars = useMemo(() => barsOf(durations, width.value), [durations, width.value]);
  const pitch = barPitch(bars.length, width.value);
  // The keyboard's bar: the active one, otherwise that of the visible step, otherwise the first.
  const inSight = shownStep(steps, store.viewport.value);
  const current = active.value >= 0 ? active.value : Math.max(barOfStep(bars, inSight), 0);

  // Before the first painting there is no width, so there is one bar.
  useLayoutEffect(() => {
    width.value = canvas.current!.clientWidth;
  }, []);

  useEffect(() => {
    const element = canvas.current!;
    let colors = readCanvasColors();
    const paint = oncePerFrame(() => {
      const { start, end } = store.viewport.peek();
      const isInSight = (step: number) => steps[step].end > start && steps[step].start < end;
      const frame = { bars, fullNs, isInSight, active: active.peek() };
      paintStepBars(prepareSurface(element), stepParts, frame, colors);
    });
    const observer = new ResizeObserver(() => {
      width.value = element.clientWidth;
      paint();
    });
    observer.observe(element);
    const unwatch = effect(() => {
      void [store.viewport.value, active.value, theme.value];
      colors = readCanvasColors();
      paint();
    });
    return () => {
      observer.disconnect();
      unwatch();
    };
  }, [stepParts, bars]);

  const goTo = (bar: number) => store.show(steps[bars[bar].slowest]);
  const point = (bar: number, x: number, y: number) => {
    active.value = bar;
    hover.value = bars[bar] ? { ...describeBar(stepParts, bars[bar]), x, y } : null;
  };
  const barUnder = (event: MouseEvent) => {
    const bar = Math.floor((event.clientX - canvas.current!.getBoundingClientRect().left) / pitch);
    return bar >= 0 && bar < bars.length ? bar : -1;
  };
  const pointAt = (bar: number) => {
    const { left, bottom } = canvas.current!.getBoundingClientRect();
    point(bar, left + (bar + 0.5) * pitch, bottom - 8);
  };
  const leave = () => point(-1, 0, 0);
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const by = KEY_STEPS[event.key];
    if (by !== undefined) pointAt(Math.min(Math.max(current + by, 0), bars.length - 1));
    else if (event.key === "Enter" || event.key === " ") goTo(current);
    else return;
    event.preventDefault();
  };
  const described = bars[current] && describeBar(stepParts, bars[current]);
  return (
    <>
      <div
        class="step-bars"
        role="slider"
        tabIndex={0}
        aria-label="Steps; arrow keys go from bar to bar, Enter zooms to the step"
        aria-valuemin={1}
        aria-valuemax={bars.length}
        aria-valuenow={current + 1}
        aria-valuetext={
          described && [described.title, ...(described.rows ?? []).map((row) => `${row.name} ${row.value}`)].join(", ")
        }
        style={{ maxWidth: `${steps.length * MAX_BAR_PX}px` }}
        onKeyDown={onKeyDown}
        onFocus={(event) => event.currentTarget.matches(":focus-visible") && pointAt(current)}
        onBlur={leave}
        onPointerMove={(event) => point(barUnder(event), event.clientX, event.clientY)}
        onPointerLeave={leave}
        onClick={(event) => {
          const bar = barUnder(event);
          if (bar >= 0) goTo(bar);
        }}
      >
        <canvas ref={canvas} aria-hidden="true" />
      </div>
      <Tooltip hover={hover} />
    </>
  );
}

/** Two cells of the ruler; nothing if no step is known. */
export function StepBars({ store }: { store: Store }) {
  const { stepParts } = store.trace;
  if (!stepParts?.steps.length) return null;
  const durations = stepParts.steps.map(durationOf);
  return (
    <>
      <div class="corner step-scale">
        <span>steps</span>
        <small>up to {formatDuration(durations.reduce((a, b) => Math.max(a, b)))}</small>
      </div>
      <div class="step-strip">
        <Bars store={store} stepParts={stepParts} />
        <Legend {...stepParts} />
      </div>
    </>
  );
}
