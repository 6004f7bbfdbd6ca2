/** Light or dark: the system's, until the user says otherwise. */
import { signal } from "@preact/signals";

export type Theme = "light" | "dark";

const KEY = "modtrace-theme";

// Storage is refused in sandboxed frames and to some file:// pages; then the choice lasts as long as the page.
function stored(): Theme | null {
  try {
    const theme = localStorage.getItem(KEY);
    return theme === "light" || theme === "dark" ? theme : null;
  } catch {
    return null;
  }
}

const system = matchMedia("(prefers-color-scheme: dark)");

export const theme = signal<Theme>(stored() ?? (system.matches ? "dark" : "light"));

system.addEventListener("change", () => {
  if (!stored()) theme.value = system.matches ? "dark" : "light";
});

export function toggleTheme(): void {
  theme.value = theme.value === "dark" ? "light" : "dark";
  try {
    localStorage.setItem(KEY, theme.value);
  } catch {
    // Not kept, as said above.
  }
}

/** What canvases are painted with; the values are the style sheet's. */
export interface Paints {
  readonly ground: string;
  readonly line: string;
  readonly faint: string;
  readonly ink: string;
  readonly muted: string;
  readonly accent: string;
  readonly range: string;
  readonly flow: string;
  readonly dim: string;
  readonly forward: string;
  readonly backward: string;
  readonly gpu: string;
  readonly counter: string;
  readonly mark: string;
  /** Of the axis, and of slices, which want a narrow one. */
  readonly font: string;
  readonly slices: string;
}

export function paints(): Paints {
  const style = getComputedStyle(document.documentElement);
  const of = (name: string) => style.getPropertyValue(`--${name}`).trim();
  return {
    ground: of("ground"),
    line: of("line"),
    faint: of("faint"),
    ink: of("ink"),
    muted: of("muted"),
    accent: of("accent"),
    range: of("range"),
    flow: of("flow"),
    dim: of("dim"),
    forward: of("forward"),
    backward: of("backward"),
    gpu: of("gpu"),
    counter: of("counter"),
    mark: of("mark"),
    font: of("font"),
    slices: of("slices"),
  };
}
