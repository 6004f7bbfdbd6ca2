/** How close marks lie, and which of them have their names drawn where not all have room. */
import type { Mark } from "../trace/trace";

/** The average distance of marks in CSS pixels; infinite for less than two. */
export function pixelsApart(marks: readonly Mark[], nsPerPixel: number): number {
  if (marks.length < 2) return Infinity;
  return (marks[marks.length - 1].time - marks[0].time) / (marks.length - 1) / nsPerPixel;
}

/**
 * Every how manyth mark has its name drawn, a power of two, so that these are `minPixels` apart on average. It depends
 * on the zoom alone: while the viewport moves, the same marks keep their names.
 */
export function nameStride(marks: readonly Mark[], nsPerPixel: number, minPixels: number): number {
  const distance = pixelsApart(marks, nsPerPixel);
  return distance > 0 ? 2 ** Math.max(0, Math.ceil(Math.log2(minPixels / distance))) : marks.length;
}
