/** Where the time axis has its ticks, and what they say. */
import type { Window } from "./trace";

export interface Tick {
  readonly time: number;
  readonly label: string;
}

const UNITS: readonly (readonly [number, string])[] = [
  [1e9, "s"],
  [1e6, "ms"],
  [1e3, "µs"],
];

/** The least of 1, 2, 5 times a power of ten that is at least `ns`. */
export function niceStep(ns: number): number {
  const power = 10 ** Math.floor(Math.log10(Math.max(ns, 1)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= ns) ?? power * 10;
}

/** Ticks at least `pixels` apart in a window that is `width` pixels wide. */
export function ticks(window: Window, width: number, pixels: number): Tick[] {
  const step = niceStep(((window.end - window.start) / Math.max(width, 1)) * pixels);
  const farthest = Math.max(Math.abs(window.start), Math.abs(window.end));
  const [scale, unit] = UNITS.find(([scale]) => farthest >= scale) ?? [1, "ns"];
  const decimals = Math.max(0, Math.ceil(Math.log10(scale / step)));
  const result: Tick[] = [];
  for (let i = Math.ceil(window.start / step); i * step <= window.end; i++) {
    const time = i * step;
    result.push({ time, label: time === 0 ? "0" : `${(time / scale).toFixed(decimals)} ${unit}` });
  }
  return result;
}
