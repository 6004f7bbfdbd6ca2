/** Patterns over spans that are incomplete, or that belong to recomputed calls. */

export interface Patterns {
  /** Stripes, over spans whose start or end was not recorded. */
  readonly incomplete: CanvasPattern;
  /** Dots, over forward calls that run again during backward. */
  readonly recompute: CanvasPattern;
}

export function createPatterns(context: CanvasRenderingContext2D): Patterns {
  return { incomplete: stripes(context), recompute: dots(context) };
}

function tile(
  context: CanvasRenderingContext2D,
  size: number,
  draw: (tileContext: CanvasRenderingContext2D) => void,
): CanvasPattern {
  const canvas = document.createElement("canvas");
  canvas.width = size;
  canvas.height = size;
  draw(canvas.getContext("2d")!);
  return context.createPattern(canvas, "repeat")!;
}

function stripes(context: CanvasRenderingContext2D): CanvasPattern {
  return tile(context, 8, (stripe) => {
    stripe.strokeStyle = "rgba(255, 255, 255, 0.75)";
    stripe.lineWidth = 2.5;
    for (const shift of [-8, 0, 8]) {
      stripe.moveTo(shift - 1, 9);
      stripe.lineTo(shift + 9, -1);
    }
    stripe.stroke();
  });
}

function dots(context: CanvasRenderingContext2D): CanvasPattern {
  return tile(context, 5, (dot) => {
    dot.fillStyle = "rgba(0, 0, 0, 0.45)";
    dot.fillRect(1, 1, 2, 2);
  });
}
