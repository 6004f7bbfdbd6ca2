/** Paints the overview: how busy each kind of track is over the whole recording, and the position of the viewport. */
import type { Store } from "../store";
import type { CanvasColors } from "../theme";
import type { Surface } from "./surface";

const KINDS = ["forward", "backward", "gpu"] as const;
type TrackKind = (typeof KINDS)[number];

/** CSS pixels of free space above and below the bands. */
const MARGIN = 3;
const FRAME_LINE = 2;
/** Opacity of the least work, so that it is visible; the opacity grows with the work, up to 1. */
const MIN_ALPHA = 0.2;

/** For each kind of track, the fraction of each pixel's time that outermost spans cover, averaged over its tracks. */
function computeLoad({ trace, bounds, levels }: Store, width: number): Map<TrackKind, Float32Array> {
  const { spans } = trace;
  const nsPerPixel = (bounds.end - bounds.start) / width;
  const result = new Map<TrackKind, Float32Array>();
  for (const kind of KINDS) {
    const tracks = [...trace.tracks.keys()].filter((i) => trace.tracks[i].kind === kind && levels[i].length);
    if (!tracks.length) continue;
    const load = new Float32Array(width);
    for (const track of tracks) {
      for (const span of levels[track][0].spans) {
        const from = (spans.start[span] - bounds.start) / nsPerPixel;
        const to = (spans.end[span] - bounds.start) / nsPerPixel;
        for (let pixel = Math.floor(from); pixel < Math.min(to, width); pixel++) {
          load[pixel] += (Math.min(to, pixel + 1) - Math.max(from, pixel)) / tracks.length;
        }
      }
    }
    result.set(kind, load);
  }
  return result;
}

/** The bands are painted once for each size and theme, then copied into each frame. */
export class OverviewPainter {
  private bands: HTMLCanvasElement | undefined;
  private bandsKey = "";

  constructor(private readonly store: Store) {}

  paint(surface: Surface, colors: CanvasColors): void {
    const { context, width, height, scale } = surface;
    const { bounds, viewport, range } = this.store;
    const key = `${width} ${height} ${scale} ${colors.ground}`;
    if (key !== this.bandsKey || !this.bands) {
      this.bandsKey = key;
      this.bands = this.drawBands(surface, colors);
    }
    context.drawImage(this.bands, 0, 0, width, height);
    const x = (time: number) => ((time - bounds.start) / (bounds.end - bounds.start)) * width;
    if (range.value) {
      const [from, to] = [x(range.value.start), x(range.value.end)];
      context.fillStyle = colors.range;
      context.fillRect(from, 0, Math.max(to - from, 1), height);
    }
    const left = Math.max(x(viewport.value.start), 0);
    const right = Math.min(Math.max(x(viewport.value.end), left + FRAME_LINE), width);
    context.fillStyle = colors.dim;
    context.fillRect(0, 0, left, height);
    context.fillRect(right, 0, width - right, height);
    context.fillStyle = colors.accent;
    for (const edge of [left, right - FRAME_LINE]) context.fillRect(edge, 0, FRAME_LINE, height);
    for (const edge of [0, height - FRAME_LINE]) context.fillRect(left, edge, right - left, FRAME_LINE);
  }

  private drawBands({ width, height, scale }: Surface, colors: CanvasColors): HTMLCanvasElement {
    const image = document.createElement("canvas");
    image.width = Math.round(width * scale);
    image.height = Math.round(height * scale);
    const context = image.getContext("2d")!;
    context.scale(scale, scale);
    const loads = computeLoad(this.store, Math.max(Math.round(width), 1));
    const bandHeight = (height - 2 * MARGIN) / Math.max(loads.size, 1);
    let y = MARGIN;
    for (const [kind, load] of loads) {
      context.fillStyle = colors[kind];
      load.forEach((busy, pixel) => {
        if (!busy) return;
        context.globalAlpha = MIN_ALPHA + (1 - MIN_ALPHA) * Math.min(busy, 1);
        context.fillRect(pixel, y, 1, bandHeight - 1);
      });
      y += bandHeight;
    }
    return image;
  }
}
