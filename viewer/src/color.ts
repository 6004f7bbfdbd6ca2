/** One colour per module class, the same in every trace that shares the class. */

export interface Color {
  /** `#rrggbb` of the span. */
  readonly fill: string;
  /** Black or white, whichever reads better on it. */
  readonly ink: string;
}

const LIGHTNESS = [0.62, 0.78, 0.5];
const CHROMA = [0.13, 0.12, 0.115];
const HUES = 16;
const SLOTS = LIGHTNESS.length * HUES;
/** How far a class moves whose slot is taken: prime to SLOTS, and to another hue and lightness. */
const STRIDE = 19;

/** FNV-1a over UTF-16 units, finished so that short names spread. */
export function hash(text: string): number {
  let value = 0x811c9dc5;
  for (let i = 0; i < text.length; i++) value = Math.imul(value ^ text.charCodeAt(i), 0x01000193);
  value = Math.imul(value ^ (value >>> 16), 0x45d9f3b);
  return (value ^ (value >>> 16)) >>> 0;
}

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
    const part = Math.min(Math.max(value, 0), 1);
    const gamma = part <= 0.0031308 ? 12.92 * part : 1.055 * part ** (1 / 2.4) - 0.055;
    return Math.round(gamma * 255);
  }) as [number, number, number];
}

/** WCAG relative luminance of `#rrggbb`. */
export function luminance(color: string): number {
  const [r, g, b] = [1, 3, 5].map((at) => {
    const part = parseInt(color.slice(at, at + 2), 16) / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function slot(index: number): Color {
  const tone = index % LIGHTNESS.length;
  const hue = (Math.floor(index / LIGHTNESS.length) * 360) / HUES + tone * (360 / HUES / LIGHTNESS.length);
  const fill = `#${rgb(LIGHTNESS[tone], CHROMA[tone], hue)
    .map((part) => part.toString(16).padStart(2, "0"))
    .join("")}`;
  return { fill, ink: luminance(fill) > 0.179 ? "#000000" : "#ffffff" };
}

/**
 * A colour for each class. A class has the slot of its hash; where two share one, the later in the alphabet moves on,
 * until there are more classes than slots.
 */
export function assignColors(classes: Iterable<string>): Map<string, Color> {
  const taken = new Set<number>();
  const result = new Map<string, Color>();
  for (const name of [...new Set(classes)].sort()) {
    let index = hash(name) % SLOTS;
    while (taken.size < SLOTS && taken.has(index)) index = (index + STRIDE) % SLOTS;
    taken.add(index);
    result.set(name, slot(index));
  }
  return result;
}
