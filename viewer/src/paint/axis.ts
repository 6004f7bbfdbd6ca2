/** Paints the time axis: ticks, the names of marks, and the duration of the selected range. */
import { formatDuration } from "../format";
import { nameStride } from "../layout/mark-density";
import { ticks } from "../layout/ticks";
import { durationOf } from "../layout/viewport";
import type { Store } from "../store";
import type { CanvasColors } from "../theme";
import { createFrame, type Frame } from "./frame";
import { MIN_TICK_PIXELS, paintMarks } from "./guides";
import { LabelFitter } from "./label-fitter";
import type { Surface } from "./surface";

/** CSS pixels: the maximum width of a mark's name, and the gap between a line and its text. */
const MAX_MARK_WIDTH = 140;
/** Named marks are on average at least this many CSS pixels apart. */
const MIN_NAME_PIXELS = 90;
const TEXT_GAP = 4;
/** Fractions of the axis' height: the middles of the upper and the lower line of text. */
const UPPER_LINE = 0.29;
const LOWER_LINE = 0.75;

export function paintAxis(surface: Surface, store: Store, colors: CanvasColors): void {
  const frame = createFrame(store, surface, 0, colors);
  surface.context.font = `${Math.round(store.rem.value * 0.72)}px ${colors.font}`;
  surface.context.textBaseline = "middle";
  paintTicks(frame);
  paintMarkNames(frame);
  paintRangeDuration(frame);
}

function paintTicks({ context, colors, viewport, width, height, x }: Frame): void {
  for (const { time, label } of ticks(viewport, width, MIN_TICK_PIXELS)) {
    const left = Math.round(x(time));
    context.fillStyle = colors.line;
    context.fillRect(left, 0, 1, height);
    if (left + TEXT_GAP + context.measureText(label).width > width) continue;
    context.fillStyle = colors.muted;
    context.fillText(label, left + TEXT_GAP, height * UPPER_LINE);
  }
}

function paintMarkNames(frame: Frame): void {
  const { context, store, colors, nsPerPixel, width, height, x } = frame;
  paintMarks(frame, () => [[height * 0.5, height]]);
  const fitter = new LabelFitter(context);
  const { marks } = store.trace;
  const stride = nameStride(marks, nsPerPixel, MIN_NAME_PIXELS);
  let freeFrom = 0;
  for (let i = 0; i < marks.length; i += stride) {
    const mark = marks[i];
    const line = Math.round(x(mark.time));
    if (line < 0 || line > width) continue;
    const label = fitter.fit(mark.text || mark.kind, MAX_MARK_WIDTH);
    // A step's mark is at its end, so the step's name ends there.
    const endsThere = mark.kind === "step" || line + TEXT_GAP + label.width > width;
    const left = endsThere ? line - label.width - TEXT_GAP : line + TEXT_GAP;
    if (left < freeFrom) continue;
    context.fillStyle = colors.ink;
    context.fillText(label.text, left, height * LOWER_LINE);
    freeFrom = Math.max(line, left + label.width) + 6;
  }
}

function paintRangeDuration({ context, store, colors, width, height, x }: Frame): void {
  const range = store.range.value;
  if (!range) return;
  const [from, to] = [Math.max(x(range.start), 0), Math.min(x(range.end), width)];
  if (to < 0 || from > width) return;
  context.fillStyle = colors.accent;
  context.fillRect(from, height - 3, Math.max(to - from, 1), 3);
  const label = formatDuration(durationOf(range));
  const labelWidth = context.measureText(label).width;
  const left = Math.min(Math.max((from + to - labelWidth) / 2, 2), width - labelWidth - 2);
  context.fillStyle = colors.ground;
  context.fillRect(left - TEXT_GAP, height * 0.52, labelWidth + 2 * TEXT_GAP, height * 0.4);
  context.fillStyle = colors.accent;
  context.fillText(label, left, height * LOWER_LINE - 1);
}
