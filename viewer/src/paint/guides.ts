/** Paints what runs through all rows: tick lines below the spans; marks and the selected range above them. */
import { pixelsApart } from "../layout/mark-density";
import { ticks } from "../layout/ticks";
import type { Frame } from "./frame";

/** Ticks are at least this many CSS pixels apart. */
export const MIN_TICK_PIXELS = 110;
/** Marks whose lines are on average this many CSS pixels apart are drawn at full strength. */
const FULL_MARK_PIXELS = 12;
const MIN_ALPHA = 0.15;

export function paintTickLines({ context, colors, viewport, width, height, x }: Frame): void {
  context.fillStyle = colors.faint;
  for (const tick of ticks(viewport, width, MIN_TICK_PIXELS)) context.fillRect(x(tick.time), 0, 1, height);
}

/** Call `draw` with each CSS pixel that has a mark in sight, once. */
function forEachMarkLine({ store, width, x }: Frame, draw: (left: number) => void): void {
  let last = -1;
  for (const { time } of store.trace.marks) {
    const left = x(time);
    if (left < 0 || left > width || left === last) continue;
    draw(left);
    last = left;
  }
}

/** A line for every mark, from a height down; fainter where they are so dense that they would hide what is below them. */
export function paintMarks(frame: Frame, from = 0): void {
  const { context, store, colors, nsPerPixel, height } = frame;
  context.fillStyle = colors.mark;
  context.globalAlpha = Math.min(Math.max(pixelsApart(store.trace.marks, nsPerPixel) / FULL_MARK_PIXELS, MIN_ALPHA), 1);
  forEachMarkLine(frame, (left) => context.fillRect(left, from, 1, height - from));
  context.globalAlpha = 1;
}

export function paintRange({ context, store, colors, width, height, x }: Frame): void {
  const range = store.range.value;
  if (!range) return;
  const [left, right] = [Math.max(x(range.start), -2), Math.min(x(range.end), width + 2)];
  if (right < 0 || left > width) return;
  context.fillStyle = colors.range;
  context.fillRect(left, 0, right - left, height);
  context.fillStyle = colors.accent;
  context.fillRect(left, 0, 1, height);
  context.fillRect(right - 1, 0, 1, height);
}
