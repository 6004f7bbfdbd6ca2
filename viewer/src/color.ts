/** One colour per module class. It depends only on the class, so it is the same in every recording. */
import { type Change, ranOtherwise, type Verdict } from "./trace/comparison";
import type { Name } from "./trace/trace";

export interface Color {
  /** `#rrggbb` of the span. */
  readonly fill: string;
  /** Black or white, the one with more contrast to `fill`. */
  readonly ink: string;
}

/** The colour space, in Oklch: all hues, and these ranges of lightness and chroma. */
const LIGHTNESS = { min: 0.46, max: 0.82 } as const;
const CHROMA = { min: 0.08, max: 0.14 } as const;

/** FNV-1a over UTF-16 units, with a final mix so that short names get different colours. */
export function hash(text: string): number {
  let value = 0x811c9dc5;
  for (let i = 0; i < text.length; i++) value = Math.imul(value ^ text.charCodeAt(i), 0x01000193);
  value = Math.imul(value ^ (value >>> 16), 0x45d9f3b);
  return (value ^ (value >>> 16)) >>> 0;
}

/** 8-bit sRGB channels of an Oklch colour, clipped to the sRGB gamut. */
function rgb(lightness: number, chroma: number, hue: number): [number, number, number] {
  const a = chroma * Math.cos((hue * Math.PI) / 180);
  const b = chroma * Math.sin((hue * Math.PI) / 180);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((value) => {
    const channel = Math.min(Math.max(value, 0), 1);
    const gamma = channel <= 0.0031308 ? 12.92 * channel : 1.055 * channel ** (1 / 2.4) - 0.055;
    return Math.round(gamma * 255);
  }) as [number, number, number];
}

/** The luminance at which black and white have the same contrast, as defined by WCAG. */
const MIN_LUMINANCE_FOR_BLACK = 0.179;

const toHex = (channel: number): string => channel.toString(16).padStart(2, "0");

/** WCAG relative luminance of `#rrggbb`. */
export function luminance(color: string): number {
  const [r, g, b] = [1, 3, 5].map((offset) => {
    const channel = parseInt(color.slice(offset, offset + 2), 16) / 255;
    return channel <= 0.04045 ? channel / 12.92 : ((channel + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

const between = ({ min, max }: { readonly min: number; readonly max: number }, byte: number): number =>
  min + ((max - min) * byte) / 255;

const toColor = (channels: readonly number[]): Color => {
  const fill = `#${channels.map(toHex).join("")}`;
  return { fill, ink: luminance(fill) > MIN_LUMINANCE_FOR_BLACK ? "#000000" : "#ffffff" };
};

/** The colour of a class: 16 bits of its hash are the hue, 8 each the lightness and the chroma. */
export function colorOf(moduleClass: string): Color {
  const bits = hash(moduleClass);
  const hue = ((bits & 0xffff) / 0x10000) * 360;
  return toColor(rgb(between(LIGHTNESS, (bits >>> 16) & 0xff), between(CHROMA, bits >>> 24), hue));
}

/** Colours of one hue, from pale to deep. */
export const shades = (hue: number, count: number): Color[] =>
  Array.from({ length: count }, (_, i) => i / (count - 1)).map((depth) =>
    toColor(rgb(0.94 - 0.5 * depth, 0.02 + 0.11 * depth, hue)),
  );
/** Hues for memory that a span takes, and for memory that it frees. */
export const TAKEN_HUE = 45;
export const GIVEN_HUE = 250;
/** Colours for a cost of 0 and for an unknown cost. */
export const NOTHING: Color = { fill: "#d3d9df", ink: "#000000" };
export const UNKNOWN: Color = { fill: "#a9b4bf", ink: "#000000" };

/** Colours for the spans of a comparison: changed spans stand out. */
export const VERDICT_COLORS: Readonly<Record<Verdict, Color>> = {
  slower: { fill: "#c2410c", ink: "#ffffff" },
  longer: { fill: "#c2410c", ink: "#ffffff" },
  faster: { fill: "#1f6fd6", ink: "#ffffff" },
  shorter: { fill: "#1f6fd6", ink: "#ffffff" },
  same: { fill: "#a9b4bf", ink: "#000000" },
  "cannot tell": { fill: "#d3d9df", ink: "#000000" },
  added: { fill: "#d9a514", ink: "#000000" },
  removed: { fill: "#7446a8", ink: "#ffffff" },
};

/** For a module with a changed number of calls: its time per step then says little. */
export const RAN_OTHERWISE: Color = { fill: "#0f8b8d", ink: "#000000" };

/** The colour for the spans of a change. */
export const colorOfChange = (change: Change): Color =>
  ranOtherwise(change) ? RAN_OTHERWISE : VERDICT_COLORS[change.verdict];

/** Colours for the parts of a step; a user's range has the colour of its name. */
const PART_COLORS: Readonly<Record<string, Color>> = {
  "data loading": { fill: "#e08a1e", ink: "#000000" },
  forward: { fill: "#3a9e5c", ink: "#000000" },
  loss: { fill: "#a3c644", ink: "#000000" },
  backward: { fill: "#3f7fd0", ink: "#000000" },
  recompute: { fill: "#7fb3f0", ink: "#000000" },
  communication: { fill: "#8e5bc0", ink: "#ffffff" },
  optimizer: { fill: "#d4578f", ink: "#000000" },
  gc: { fill: "#d93025", ink: "#ffffff" },
  compile: { fill: "#7a5a46", ink: "#ffffff" },
  saving: { fill: "#0f8b8d", ink: "#000000" },
  evaluation: { fill: "#e3c32c", ink: "#000000" },
  torch: { fill: "#8793a0", ink: "#000000" },
  other: { fill: "#c3cad2", ink: "#000000" },
};

/** The colour of a part of a step, or of a range's category. */
export const partColor = (part: string): Color => PART_COLORS[part] ?? colorOf(part);

/** Prefix of the class of a range; its category follows. */
const RANGE_CLASS = "range · ";

/** The key of a name's colour: its class; for a range, its category; for a user's range, its own name. */
export function colorKey({ label, moduleClass }: Pick<Name, "label" | "moduleClass">): string {
  return moduleClass === `${RANGE_CLASS}user` ? label : moduleClass || label;
}

/** The colour of each key. */
export function assignColors(keys: Iterable<string>): Map<string, Color> {
  const color = (key: string) =>
    key.startsWith(RANGE_CLASS) ? partColor(key.slice(RANGE_CLASS.length)) : colorOf(key);
  return new Map([...new Set(keys)].sort().map((key) => [key, color(key)]));
}
