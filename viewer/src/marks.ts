/** Which marks are drawn, where there are more of them than lines can be told apart. */
import type { Mark } from "./trace";

/**
 * Every how manyth mark is drawn, a power of two, so that those drawn are `pixels` apart on average. It depends on the
 * zoom alone: while the window moves, the same marks stay.
 */
export function markStride(marks: readonly Mark[], nsPerPixel: number, pixels: number): number {
  if (marks.length < 2) return 1;
  const apart = (marks[marks.length - 1].time - marks[0].time) / (marks.length - 1) / nsPerPixel;
  return apart > 0 ? 2 ** Math.max(0, Math.ceil(Math.log2(pixels / apart))) : marks.length;
}
