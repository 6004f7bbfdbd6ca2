/** Paints a stacked bar per step, with its parts from the bottom up. */
import { partColor } from "../color";
import { barPitch, type StepBar } from "../layout/step-bars";
import type { CanvasColors } from "../theme";
import { partsOfStep, type StepParts } from "../trace/step-parts";
import type { Surface } from "./surface";

/**
 * CSS pixels: above the highest bar, for the mark of a bar that is cut off; below all bars, for the line of the visible
 * steps.
 */
const TOP = 4;
const BOTTOM = 4;
const GAP = 1;

export interface StepBarsFrame {
  readonly bars: readonly StepBar[];
  /** The duration in ns of a bar of full height. */
  readonly fullNs: number;
  /** Whether a step is visible in the timeline. */
  readonly isInSight: (step: number) => boolean;
  /** Index of the bar under the pointer or the keyboard's focus, -1 for none. */
  readonly active: number;
}

export function paintStepBars(
  surface: Surface,
  stepParts: StepParts,
  frame: StepBarsFrame,
  colors: CanvasColors,
): void {
  const { context, width, height, scale } = surface;
  const { bars, fullNs, isInSight, active } = frame;
  const pitch = barPitch(bars.length, width);
  const snap = (pixels: number) => Math.round(pixels * scale) / scale;
  const bottom = height - BOTTOM;
  const fills = stepParts.parts.map(({ name }) => partColor(name).fill);
  bars.forEach(({ first, last, slowest }, bar) => {
    const left = snap(bar * pitch);
    const right = Math.max(snap((bar + 1) * pitch) - GAP, left + 1);
    if (bar === active) {
      context.fillStyle = colors.range;
      context.fillRect(left - GAP, 0, right - left + 2 * GAP, height);
    }
    let ns = 0;
    let y = bottom;
    partsOfStep(stepParts, slowest).forEach((part, index) => {
      if (!part) return;
      ns += part;
      const upper = Math.max(snap(bottom - (ns / fullNs) * (bottom - TOP)), TOP);
      context.fillStyle = fills[index];
      context.fillRect(left, upper, right - left, y - upper);
      y = upper;
    });
    context.fillStyle = colors.ink;
    // The bar is cut off: paint a gap, and a line above it.
    if (ns > fullNs * 1.001) context.fillRect(left, 0, right - left, 2);
    context.fillStyle = colors.accent;
    let seen = false;
    for (let step = first; step <= last && !seen; step++) seen = isInSight(step);
    if (seen) context.fillRect(left - GAP, height - 2, right - left + 2 * GAP, 2);
  });
}
