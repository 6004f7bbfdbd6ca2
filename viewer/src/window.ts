/** Arithmetic of the shown window: pure functions from a window to a window. */
import type { Window } from "./trace";

/** The narrowest window, in ns. */
const NARROWEST = 20;
/** How far beyond its ends the trace may be pushed, as a part of the window. */
const MARGIN = 0.5;

export const length = (window: Window): number => window.end - window.start;

/** Keep the window's length within what there is, and a part of the trace in sight. */
export function clamp(window: Window, bounds: Window): Window {
  const widest = length(bounds) * 1.1;
  const size = Math.min(Math.max(length(window), Math.min(NARROWEST, widest)), widest);
  const centre = (window.start + window.end) / 2;
  const lowest = bounds.start - size * MARGIN;
  const highest = bounds.end + size * MARGIN;
  const start = Math.min(Math.max(centre - size / 2, lowest), highest - size);
  return { start, end: start + size };
}

/** Zoom by a factor (below 1 shows less), keeping `at` where it is. */
export function zoom(window: Window, factor: number, at: number, bounds: Window): Window {
  const size = length(window);
  const widest = length(bounds) * 1.1;
  const wanted = Math.min(Math.max(size * factor, Math.min(NARROWEST, widest)), widest);
  const start = at - ((at - window.start) / size) * wanted;
  return clamp({ start, end: start + wanted }, bounds);
}

/** Move by a part of the window's own length. */
export function pan(window: Window, part: number, bounds: Window): Window {
  const by = length(window) * part;
  return clamp({ start: window.start + by, end: window.end + by }, bounds);
}

/** A window around a stretch, with a margin on both sides. */
export function around(stretch: Window, bounds: Window): Window {
  const margin = Math.max(length(stretch) * 0.02, NARROWEST / 2);
  return clamp({ start: stretch.start - margin, end: stretch.end + margin }, bounds);
}

/** The window moved, and widened where it must be, so that a stretch is in sight. */
export function reveal(window: Window, stretch: Window, bounds: Window): Window {
  const size = length(window);
  if (stretch.start >= window.start && stretch.end <= window.end) {
    // In sight, but too thin to be seen: leave at least a three-hundredth of the window to it.
    return length(stretch) * 300 < size ? around(widen(stretch, size / 20), bounds) : window;
  }
  if (length(stretch) > size * 0.9 || length(stretch) * 300 < size) return around(widen(stretch, size / 20), bounds);
  const centre = (stretch.start + stretch.end) / 2;
  return clamp({ start: centre - size / 2, end: centre + size / 2 }, bounds);
}

function widen(stretch: Window, most: number): Window {
  const size = Math.max(length(stretch), Math.min(length(stretch) * 20, most));
  const centre = (stretch.start + stretch.end) / 2;
  return { start: centre - size / 2, end: centre + size / 2 };
}
