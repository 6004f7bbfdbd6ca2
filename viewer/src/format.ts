/** Names come from a recording and may contain any character: make each of them visible. */

// C0 and C1 controls, line and paragraph separators, and characters that reorder the text around them.
// biome-ignore lint/suspicious/noControlCharactersInRegex: it is these that are looked for
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;

function visibleCharacter(character: string): string {
  const code = character.charCodeAt(0);
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  if (code === 0x7f) return "\u2421";
  return `\\u${code.toString(16).padStart(4, "0")}`;
}

/** The text with visible symbols for control characters, and U+FFFD for lone surrogates. */
export function visibleText(text: string): string {
  return text.toWellFormed().replace(HIDDEN, visibleCharacter);
}

/** The text, without its start if it has more than `limit` UTF-16 units: the end of a name distinguishes it best. */
export const shortenFromLeft = (text: string, limit: number): string =>
  text.length > limit ? `…${text.slice(1 - limit).replace(/^[\udc00-\udfff]/, "")}` : text;

const NATURAL = new Intl.Collator("en", { numeric: true });

/**
 * The order of two values of a column: numbers by size, texts by their words and numbers, so `h.2` is before `h.10`.
 */
export function compareValues(a: string | number, b: string | number): number {
  if (typeof a === "string" && typeof b === "string") return NATURAL.compare(a, b) || (a < b ? -1 : a > b ? 1 : 0);
  return a < b ? -1 : a > b ? 1 : 0;
}

const SIGNIFICANT = new Intl.NumberFormat("en", { maximumSignificantDigits: 4, useGrouping: false });
const GROUPED = new Intl.NumberFormat("en");

/** An integer with separated thousands. */
export const formatCount = (count: number): string => GROUPED.format(count);

const TIME_UNITS: readonly (readonly [number, string])[] = [
  [1e9, "s"],
  [1e6, "ms"],
  [1e3, "µs"],
  [1, "ns"],
];

/** A duration in ns, with four digits: `12.35 ms`. */
export function formatDuration(ns: number): string {
  const size = Math.abs(ns);
  // 999.96 µs rounds to 1000 µs, which reads better as 1 ms.
  const [scale, unit] = TIME_UNITS.find(([unitNs]) => size >= unitNs * 0.99995) ?? TIME_UNITS[3];
  return `${SIGNIFICANT.format(ns / scale)} ${unit}`;
}

/** A time in ns, exact to the ns: `12.345678 ms`. */
export function formatMoment(ns: number): string {
  const [scale, unit] = TIME_UNITS.find(([unitNs]) => Math.abs(ns) >= unitNs) ?? TIME_UNITS[3];
  const digits = (ns / scale).toFixed(Math.round(Math.log10(scale)));
  return `${digits.includes(".") ? digits.replace(/\.?0+$/, "") : digits} ${unit}`;
}

const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** A counter's value with its unit; bytes in powers of 1024. */
export function formatQuantity(value: number, unit: string): string {
  if (unit !== "bytes") return `${SIGNIFICANT.format(value)}${unit && ` ${unit}`}`;
  let power = 0;
  while (Math.abs(value) >= 1024 && power < BYTE_UNITS.length - 1) {
    value /= 1024;
    power++;
  }
  return `${SIGNIFICANT.format(value)} ${BYTE_UNITS[power]}`;
}

/** FLOPs per second in the format of `modtrace summary`: `12.35 GFLOP/s`. */
export const formatFlopRate = (perSecond: number): string => `${SIGNIFICANT.format(perSecond / 1e9)} GFLOP/s`;

/** `1 span`, `2 spans`. */
export const plural = (count: number, noun: string, nouns = `${noun}s`): string =>
  `${formatCount(count)} ${count === 1 ? noun : nouns}`;
