/** How many marks are drawn where there are more of them than lines that can be told apart. */
import type { Mark } from "../trace/trace";

/**
 * Every how manyth mark is drawn, a power of two, so that those drawn are `minPixels` apart on average. It depends on
 * the zoom alone: while the viewport moves, the same marks stay.
 */
export function markStride(marks: readonly Mark[], nsPerPixel: number, minPixels: number): number {
  if (marks.length < 2) return 1;
  const pixelsApart = (marks[marks.length - 1].time - marks[0].time) / (marks.length - 1) / nsPerPixel;
  return pixelsApart > 0 ? 2 ** Math.max(0, Math.ceil(Math.log2(minPixels / pixelsApart))) : marks.length;
}
