/** Light or dark: the system's theme, until the user chooses. */
import { signal } from "@preact/signals";

export type Theme = "light" | "dark";

const STORAGE_KEY = "modtrace-theme";

// Sandboxed frames and some file:// pages refuse storage; then the choice lasts as long as the page.
function storedTheme(): Theme | null {
  try {
    const value = localStorage.getItem(STORAGE_KEY);
    return value === "light" || value === "dark" ? value : null;
  } catch {
    return null;
  }
}

const systemDark = matchMedia("(prefers-color-scheme: dark)");

export const theme = signal<Theme>(storedTheme() ?? (systemDark.matches ? "dark" : "light"));

systemDark.addEventListener("change", () => {
  if (!storedTheme()) theme.value = systemDark.matches ? "dark" : "light";
});

export function toggleTheme(): void {
  theme.value = theme.value === "dark" ? "light" : "dark";
  try {
    localStorage.setItem(STORAGE_KEY, theme.value);
  } catch {
    // The choice is not stored, see above.
  }
}

/** Colours and fonts of the canvases, with the values of the style sheet. */
const COLOR_NAMES = [
  "ground",
  "line",
  "faint",
  "ink",
  "muted",
  "accent",
  "range",
  "flow",
  "dim",
  "forward",
  "backward",
  "gpu",
  "counter",
  "mark",
] as const;

export type CanvasColors = Readonly<Record<(typeof COLOR_NAMES)[number], string>> & {
  readonly font: string;
  /** A narrow font for the labels of spans. */
  readonly spanFont: string;
};

/** Read the values of the current theme from the style sheet. */
export function readCanvasColors(): CanvasColors {
  const style = getComputedStyle(document.documentElement);
  const styleValue = (property: string) => style.getPropertyValue(property).trim();
  const colors = Object.fromEntries(COLOR_NAMES.map((color) => [color, styleValue(`--${color}`)]));
  return { ...colors, font: styleValue("--font"), spanFont: styleValue("--span-font") } as CanvasColors;
}
