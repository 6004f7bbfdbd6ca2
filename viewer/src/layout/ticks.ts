/** Positions and labels of the ticks of the time axis. */
import type { TimeRange } from "../trace/trace";

export interface Tick {
  readonly time: number;
  readonly label: string;
}

const UNITS: readonly (readonly [number, string])[] = [
  [1e9, "s"],
  [1e6, "ms"],
  [1e3, "µs"],
];

/** The smallest of 1, 2, 5 times a power of ten that is at least `ns`. */
export function niceStep(ns: number): number {
  const power = 10 ** Math.floor(Math.log10(Math.max(ns, 1)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= ns) ?? power * 10;
}

/** Ticks at least `minPixels` apart in a viewport that is `width` pixels wide. */
export function ticks(viewport: TimeRange, width: number, minPixels: number): Tick[] {
  const step = niceStep(((viewport.end - viewport.start) / Math.max(width, 1)) * minPixels);
  const farthest = Math.max(Math.abs(viewport.start), Math.abs(viewport.end));
  const [scale, unit] = UNITS.find(([size]) => farthest >= size) ?? [1, "ns"];
  const decimals = Math.max(0, Math.ceil(Math.log10(scale / step)));
  const result: Tick[] = [];
  for (let i = Math.ceil(viewport.start / step); i * step <= viewport.end; i++) {
    const time = i * step;
    result.push({ time, label: time === 0 ? "0" : `${(time / scale).toFixed(decimals)} ${unit}` });
  }
  return result;
}
