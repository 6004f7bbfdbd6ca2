/** The distance of marks, and the choice of marks with drawn names if there is no room for all. */
import type { Mark } from "../trace/trace";

/** The average distance of marks in CSS pixels; infinite for fewer than two. */
export function pixelsApart(marks: readonly Mark[], nsPerPixel: number): number {
  if (marks.length < 2) return Infinity;
  return (marks[marks.length - 1].time - marks[0].time) / (marks.length - 1) / nsPerPixel;
}

/**
 * The interval of marks with drawn names, a power of two, such that these are `minPixels` apart on average. It depends
 * only on the zoom, so the same marks keep their names while the viewport moves.
 */
export function nameStride(marks: readonly Mark[], nsPerPixel: number, minPixels: number): number {
  const distance = pixelsApart(marks, nsPerPixel);
  return distance > 0 ? 2 ** Math.max(0, Math.ceil(Math.log2(minPixels / distance))) : marks.length;
}
