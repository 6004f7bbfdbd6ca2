/** Paints the overview of the whole trace and the time axis below it. */
import { markStride } from "../marks";
import type { Store } from "../store";
import { formatDuration } from "../text";
import type { Paints } from "../theme";
import { ticks } from "../ticks";
import { length } from "../window";
import { MARK_PIXELS, TICK_PIXELS } from "./slices";
import { Fitter, type Surface } from "./surface";

type Band = "forward" | "backward" | "gpu";
const BANDS: readonly Band[] = ["forward", "backward", "gpu"];

/** How much of each pixel's time some outermost slice covers, per kind of track that the trace has. */
function load({ trace, bounds, lanes }: Store, width: number): Map<Band, Float32Array> {
  const { spans } = trace;
  const perPixel = (bounds.end - bounds.start) / width;
  const result = new Map<Band, Float32Array>();
  for (const band of BANDS) {
    const tracks = [...trace.tracks.keys()].filter((i) => trace.tracks[i].kind === band && lanes[i].length);
    if (!tracks.length) continue;
    const busy = new Float32Array(width);
    for (const track of tracks) {
      for (const span of lanes[track][0].spans) {
        const from = (spans.start[span] - bounds.start) / perPixel;
        const to = (spans.end[span] - bounds.start) / perPixel;
        for (let pixel = Math.floor(from); pixel < Math.min(to, width); pixel++) {
          busy[pixel] += (Math.min(to, pixel + 1) - Math.max(from, pixel)) / tracks.length;
        }
      }
    }
    result.set(band, busy);
  }
  return result;
}

/** The overview without its window, painted once for each size and theme. */
export class OverviewPainter {
  private image: HTMLCanvasElement | undefined;
  private key = "";

  constructor(private readonly store: Store) {}

  paint({ context, width, height, scale }: Surface, paints: Paints): void {
    const { bounds, window, range } = this.store;
    const key = `${width} ${height} ${scale} ${paints.ground}`;
    if (key !== this.key) {
      this.key = key;
      this.image = this.draw(width, height, scale, paints);
    }
    context.drawImage(this.image!, 0, 0, width, height);
    const x = (time: number) => ((time - bounds.start) / (bounds.end - bounds.start)) * width;
    if (range.value) {
      const [from, to] = [x(range.value.start), x(range.value.end)];
      context.fillStyle = paints.range;
      context.fillRect(from, 0, Math.max(to - from, 1), height);
    }
    const left = Math.max(x(window.value.start), 0);
    const right = Math.min(Math.max(x(window.value.end), left + 2), width);
    context.fillStyle = paints.dim;
    context.fillRect(0, 0, left, height);
    context.fillRect(right, 0, width - right, height);
    context.fillStyle = paints.accent;
    for (const edge of [left, right - 2]) context.fillRect(edge, 0, 2, height);
    context.fillRect(left, 0, right - left, 2);
    context.fillRect(left, height - 2, right - left, 2);
  }

  private draw(width: number, height: number, scale: number, paints: Paints): HTMLCanvasElement {
    const image = document.createElement("canvas");
    image.width = Math.round(width * scale);
    image.height = Math.round(height * scale);
    const context = image.getContext("2d")!;
    context.scale(scale, scale);
    const bands = load(this.store, Math.max(Math.round(width), 1));
    const high = (height - 6) / Math.max(bands.size, 1);
    let top = 3;
    for (const [band, busy] of bands) {
      context.fillStyle = paints[band];
      busy.forEach((part, pixel) => {
        if (!part) return;
        // Even a little work must be seen.
        context.globalAlpha = 0.2 + 0.8 * Math.min(part, 1);
        context.fillRect(pixel, top, 1, high - 1);
      });
      top += high;
    }
    return image;
  }
}

/** The axis: ticks, the marks' names, and the length of the selected range. */
export function paintAxis({ context, width, height }: Surface, store: Store, paints: Paints): void {
  const window = store.window.value;
  const x = (time: number) => ((time - window.start) / (window.end - window.start)) * width;
  const size = Math.round(store.rem.value * 0.72);
  context.font = `${size}px ${paints.font}`;
  context.textBaseline = "middle";
  const upper = height * 0.29;
  const lower = height * 0.75;
  for (const { time, label } of ticks(window, width, TICK_PIXELS)) {
    context.fillStyle = paints.line;
    context.fillRect(Math.round(x(time)), 0, 1, height);
    const left = Math.round(x(time)) + 4;
    if (left + context.measureText(label).width > width) continue;
    context.fillStyle = paints.muted;
    context.fillText(label, left, upper);
  }
  const fitter = new Fitter(context);
  const { marks } = store.trace;
  const stride = markStride(marks, (window.end - window.start) / width, MARK_PIXELS);
  let free = -Infinity;
  for (let i = 0; i < marks.length; i += stride) {
    const mark = marks[i];
    const at = Math.round(x(mark.time));
    if (at < 0 || at > width) continue;
    context.fillStyle = paints.mark;
    context.fillRect(at, height * 0.5, 1, height * 0.5);
    const { text, width: wide } = fitter.fit(mark.text || mark.kind, 140);
    // A mark stands at the end of its step, so its name ends there.
    const left = mark.kind === "step" ? at - wide - 4 : at + 4;
    if (left < Math.max(free, 0)) continue;
    context.fillStyle = paints.ink;
    context.fillText(text, left, lower);
    free = Math.max(at, left + wide) + 6;
  }
  const range = store.range.value;
  if (!range) return;
  const [from, to] = [Math.max(x(range.start), 0), Math.min(x(range.end), width)];
  if (to < 0 || from > width) return;
  context.fillStyle = paints.accent;
  context.fillRect(from, height - 3, Math.max(to - from, 1), 3);
  const label = formatDuration(length(range));
  const wide = context.measureText(label).width;
  const left = Math.min(Math.max((from + to - wide) / 2, 2), width - wide - 2);
  context.fillStyle = paints.ground;
  context.fillRect(left - 4, height * 0.52, wide + 8, height * 0.4);
  context.fillStyle = paints.accent;
  context.fillText(label, left, lower - 1);
}
