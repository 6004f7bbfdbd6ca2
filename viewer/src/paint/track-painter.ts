/** Paints the visible rows: tracks and counters, the lines through all rows, and the highlights. */
import type { Store } from "../store";
import type { CanvasColors } from "../theme";
import { paintCounter } from "./counter-painter";
import { createFrame } from "./frame";
import { paintMarks, paintRange, paintTickLines } from "./guides";
import { paintHighlights } from "./highlights";
import { SpanBatches } from "./span-batches";
import type { Surface } from "./surface";

export class TrackPainter {
  private readonly batches = new SpanBatches();

  constructor(private readonly store: Store) {}

  /**
   * @param scrollTop CSS pixels of rows above the surface
   * @param hovered index of the span under the pointer, -1 for none
   */
  paint(surface: Surface, scrollTop: number, colors: CanvasColors, hovered: number): void {
    const frame = createFrame(this.store, surface, scrollTop, colors);
    const { context, width, height } = surface;
    paintTickLines(frame);
    for (const row of this.store.rows.value) {
      if (row.top + row.height <= scrollTop || row.top >= scrollTop + height) continue;
      context.fillStyle = colors.line;
      context.fillRect(0, row.top + row.height - scrollTop - 1, width, 1);
      if (row.type === "counter") paintCounter(frame, row);
      if (row.type === "track") this.batches.add(frame, row);
    }
    this.batches.paint(frame);
    paintMarks(frame);
    paintRange(frame);
    paintHighlights(frame, hovered);
  }
}
