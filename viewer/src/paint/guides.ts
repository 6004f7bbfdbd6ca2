/** Paints what runs through all rows: tick lines below the spans; marks and the selected range above them. */
import { markStride } from "../layout/mark-density";
import { ticks } from "../layout/ticks";
import type { Frame } from "./frame";

/** Ticks are at least this many CSS pixels apart. */
export const MIN_TICK_PIXELS = 110;
/** Marks are on average at least this many CSS pixels apart, so that their names have room. */
export const MIN_MARK_PIXELS = 90;

export function paintTickLines({ context, colors, viewport, width, height, x }: Frame): void {
  context.fillStyle = colors.faint;
  for (const tick of ticks(viewport, width, MIN_TICK_PIXELS)) context.fillRect(x(tick.time), 0, 1, height);
}

export function paintMarks({ context, store, colors, nsPerPixel, width, height, x }: Frame): void {
  const { marks } = store.trace;
  const stride = markStride(marks, nsPerPixel, MIN_MARK_PIXELS);
  context.fillStyle = colors.mark;
  for (let i = 0; i < marks.length; i += stride) {
    const left = x(marks[i].time);
    if (left >= 0 && left <= width) context.fillRect(left, 0, 1, height);
  }
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
