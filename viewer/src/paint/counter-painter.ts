/** Paints a counter's row: its value over time as a filled step line. */

import { formatQuantity } from "../format";
import type { Row } from "../layout/rows";
import { lowerBound } from "../trace/depth-levels";
import { isMemory, maximumOf, peakOf } from "../trace/memory";
import type { Frame } from "./frame";

const LINE_HEIGHT = 1.5;
const FILL_ALPHA = 0.35;
/** CSS pixels: half the width of a peak's mark, the gap between the mark and its text, and the height of the text. */
const PEAK_MARK = 5;
const PEAK_GAP = 8;
const PEAK_FONT = 11;

export function paintCounter(frame: Frame, row: Row): void {
  const { context, store, colors, viewport, width, scrollTop, x } = frame;
  const counter = store.trace.counters[row.index];
  const { time, value } = counter;
  const maximum = maximumOf(counter);
  const bottom = row.top + row.height - scrollTop - 1;
  const fullHeight = row.height - store.metrics.value.gap;
  // The last sample before the viewport is still valid at its start.
  const first = Math.max(lowerBound(time, viewport.start) - 1, 0);
  context.fillStyle = colors.counter;
  for (let i = first; i < time.length && time[i] <= viewport.end; ) {
    const left = Math.max(x(time[i]), 0);
    let shown = value[i];
    // If several samples fall on one pixel, the highest is shown.
    for (i++; i < time.length && x(time[i]) <= left; i++) shown = Math.max(shown, value[i]);
    // The last value is valid until the end.
    const right = Math.min(x(i < time.length ? time[i] : store.bounds.end), width);
    const height = maximum > 0 ? Math.max((shown / maximum) * fullHeight, 0) : 0;
    context.globalAlpha = FILL_ALPHA;
    context.fillRect(left, bottom - height, Math.max(right - left, 1), height);
    context.globalAlpha = 1;
    context.fillRect(left, bottom - height, Math.max(right - left, 1), LINE_HEIGHT);
  }
  const peak = peakOf(counter);
  if (isMemory(counter) && !row.folded && peak >= 0) {
    paintPeak(frame, x(time[peak]), bottom - fullHeight, `peak ${formatQuantity(value[peak], counter.unit)}`);
  }
}

/** A mark at the top of the curve, with the value beside it. */
function paintPeak({ context, colors, width }: Frame, left: number, y: number, text: string): void {
  if (left < 0 || left > width) return;
  context.fillStyle = colors.mark;
  context.beginPath();
  context.moveTo(left - PEAK_MARK, y - 2);
  context.lineTo(left + PEAK_MARK, y - 2);
  context.lineTo(left, y + PEAK_MARK);
  context.fill();
  context.font = `${PEAK_FONT}px ${colors.font}`;
  context.textBaseline = "top";
  const size = context.measureText(text).width;
  const from = left + PEAK_GAP + size > width ? left - PEAK_GAP - size : left + PEAK_GAP;
  context.fillStyle = colors.ground;
  context.fillRect(from - 2, y, size + 4, PEAK_FONT + 2);
  context.fillStyle = colors.ink;
  context.fillText(text, from, y + 1);
}
