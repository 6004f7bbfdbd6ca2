/** Light or dark: the system's, until the user says otherwise. */
import { signal } from "@preact/signals";

export type Theme = "light" | "dark";

const STORAGE_KEY = "modtrace-theme";

// Storage is refused in sandboxed frames and to some file:// pages; then the choice lasts as long as the page.
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

/** The colours and fonts that canvases are painted with; the values are the style sheet's. */
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
  /** A narrow one, for the labels of spans. */
  readonly spanFont: string;
};

/** Read the values from the style sheet, as the theme has them now. */
export function readCanvasColors(): CanvasColors {
  const style = getComputedStyle(document.documentElement);
  const styleValue = (property: string) => style.getPropertyValue(property).trim();
  const colors = Object.fromEntries(COLOR_NAMES.map((color) => [color, styleValue(`--${color}`)]));
  return { ...colors, font: styleValue("--font"), spanFont: styleValue("--span-font") } as CanvasColors;
}
