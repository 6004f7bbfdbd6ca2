/** Paints the lines through all rows: ticks below the spans; marks and the selected range above them. */
import { pixelsApart } from "../layout/mark-density";
import { rowsByProcess, rowsHeight } from "../layout/rows";
import { ticks } from "../layout/ticks";
import type { Mark } from "../trace/trace";
import type { Frame } from "./frame";

/** Ticks are at least this many CSS pixels apart. */
export const MIN_TICK_PIXELS = 110;
/** Marks are drawn at full strength if their average distance is at least this many CSS pixels. */
const FULL_MARK_PIXELS = 12;
const MIN_ALPHA = 0.15;

export function paintTickLines({ context, colors, viewport, width, height, x }: Frame): void {
  context.fillStyle = colors.faint;
  for (const tick of ticks(viewport, width, MIN_TICK_PIXELS)) context.fillRect(x(tick.time), 0, 1, height);
}

/** Call `draw` once for each CSS pixel with a visible mark; in a comparison, for each visible mark. */
function forEachMarkLine({ store, width, x }: Frame, draw: (left: number, mark: Mark) => void): void {
  let last = -1;
  for (const mark of store.trace.marks) {
    const left = x(mark.time);
    if (left < 0 || left > width || (left === last && !store.trace.comparison)) continue;
    draw(left, mark);
    last = left;
  }
}

/** Vertical extents of a mark's line in CSS pixels: all rows; in a comparison, the rows of the mark's side. */
function reachOf({ store, scrollTop, height }: Frame, { text }: Mark): (readonly [number, number])[] {
  const side = store.trace.comparison?.titles.find((title) => text.endsWith(title));
  if (side === undefined) return [[0, height]];
  return rowsByProcess(store.rows.value)
    .filter(([header]) => header.title.startsWith(`${side} · `))
    .map((rows) => [rows[0].top - scrollTop, rowsHeight(rows) - scrollTop]);
}

/** A line for every mark; fainter if they are so dense that they would hide the spans below them. */
export function paintMarks(frame: Frame, reach = (mark: Mark) => reachOf(frame, mark)): void {
  const { context, store, colors, nsPerPixel } = frame;
  context.fillStyle = colors.mark;
  context.globalAlpha = Math.min(Math.max(pixelsApart(store.trace.marks, nsPerPixel) / FULL_MARK_PIXELS, MIN_ALPHA), 1);
  forEachMarkLine(frame, (left, mark) => {
    for (const [from, to] of reach(mark)) context.fillRect(left, from, 1, to - from);
  });
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
