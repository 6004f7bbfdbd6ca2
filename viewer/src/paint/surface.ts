/** Canvases in the screen's resolution and in the size of their elements, painted at most once per frame. */

export interface Surface {
  readonly context: CanvasRenderingContext2D;
  /** CSS pixels. */
  readonly width: number;
  readonly height: number;
  /** Device pixels per CSS pixel. */
  readonly scale: number;
}

/** Fit the canvas to its element and clear it. Coordinates of the context are CSS pixels. */
export function prepareSurface(canvas: HTMLCanvasElement): Surface {
  const scale = devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  const [deviceWidth, deviceHeight] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== deviceWidth || canvas.height !== deviceHeight) {
    canvas.width = deviceWidth;
    canvas.height = deviceHeight;
  }
  const context = canvas.getContext("2d", { alpha: true })!;
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height, scale };
}

/** Return a function that requests one call of `paint` in the next frame, however often it is called before. */
export function oncePerFrame(paint: () => void): () => void {
  let requested = false;
  return () => {
    if (requested) return;
    requested = true;
    requestAnimationFrame(() => {
      requested = false;
      paint();
    });
  };
}
