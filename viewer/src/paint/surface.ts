/** A canvas that is as sharp as the screen and as large as its element. */

export interface Surface {
  readonly context: CanvasRenderingContext2D;
  /** CSS pixels. */
  readonly width: number;
  readonly height: number;
  /** Device pixels per CSS pixel. */
  readonly scale: number;
}

/** Fit the canvas to its element and clear it. */
export function prepare(canvas: HTMLCanvasElement): Surface {
  const scale = devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  const [wide, high] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
  }
  const context = canvas.getContext("2d", { alpha: true })!;
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height, scale };
}

/** Call `paint` once in the next frame, however often it is asked for. */
export function scheduler(paint: () => void): () => void {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      paint();
    });
  };
}

/** Cuts labels to a width, by the widths of their characters. */
export class Fitter {
  private readonly widths = new Map<string, number>();
  private readonly ellipsis: number;

  constructor(private readonly context: CanvasRenderingContext2D) {
    this.ellipsis = this.widthOf("…");
  }

  /** The label, or as much of it as fits in `most` pixels with an ellipsis; empty where not even two characters do. */
  fit(label: string, most: number): { text: string; width: number } {
    let width = 0;
    let cut = 0;
    let cutWidth = 0;
    let at = 0;
    for (const character of label) {
      width += this.widthOf(character);
      at += character.length;
      if (width + this.ellipsis <= most) {
        cut = at;
        cutWidth = width;
      }
      if (width > most) {
        return cut < 1 ? { text: "", width: 0 } : { text: `${label.slice(0, cut)}…`, width: cutWidth + this.ellipsis };
      }
    }
    return { text: label, width };
  }

  private widthOf(character: string): number {
    let width = this.widths.get(character);
    if (width === undefined) {
      width = this.context.measureText(character).width;
      this.widths.set(character, width);
    }
    return width;
  }
}
