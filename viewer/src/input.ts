/** Mouse, wheel and keys on the timeline, as moves of the window and the selection. */
import type { Store } from "./store";
import type { Window } from "./trace";
import { length, pan, zoom } from "./window";

/** Moved by less than this, a press is a click. */
const CLICK_PIXELS = 4;
/** Of the window's length, in a second. */
const PAN_SPEED = 1.2;
/** By e, in a second. */
const ZOOM_SPEED = 2.5;
/** What a tap on a key moves by, in seconds of holding it. */
const TAP = 0.06;

export const timeAt = (window: Window, part: number): number => window.start + part * length(window);

const ordered = (a: number, b: number): Window => ({ start: Math.min(a, b), end: Math.max(a, b) });

type DragMode = "pan" | "range";

/** Follow presses on an element: drags pan or select a range, clicks are handed on. */
export function onDrag(
  element: HTMLElement,
  store: Store,
  options: {
    mode: (event: PointerEvent) => DragMode;
    scroll?: (pixels: number) => void;
    click: (event: PointerEvent) => void;
  },
): () => void {
  const down = (event: PointerEvent) => {
    if (event.button !== 0 || !event.isPrimary) return;
    const box = element.getBoundingClientRect();
    const part = (at: PointerEvent) => (at.clientX - box.left) / box.width;
    const mode = options.mode(event);
    const origin = store.window.value;
    const from = timeAt(origin, part(event));
    let lastY = event.clientY;
    let dragging = false;
    element.setPointerCapture(event.pointerId);
    const move = (at: PointerEvent) => {
      if (at.pointerId !== event.pointerId) return;
      if (!dragging && Math.hypot(at.clientX - event.clientX, at.clientY - event.clientY) < CLICK_PIXELS) return;
      dragging = true;
      if (mode === "range") {
        store.setRange(ordered(from, timeAt(store.window.value, part(at))));
        return;
      }
      element.dataset.dragging = "";
      const by = (part(at) - part(event)) * length(origin);
      store.move({ start: origin.start - by, end: origin.end - by });
      options.scroll?.(lastY - at.clientY);
      lastY = at.clientY;
    };
    const stop = (at: PointerEvent) => {
      // Another finger's press makes it a pinch; what else it does is not of this drag.
      const same = at.pointerId === event.pointerId;
      if (same === (at.type === "pointerdown")) return;
      element.removeEventListener("pointermove", move);
      element.removeEventListener("pointerdown", stop);
      element.removeEventListener("pointerup", stop);
      element.removeEventListener("pointercancel", stop);
      delete element.dataset.dragging;
      if (same && !dragging && at.type === "pointerup") options.click(at);
    };
    element.addEventListener("pointermove", move);
    element.addEventListener("pointerdown", stop);
    element.addEventListener("pointerup", stop);
    element.addEventListener("pointercancel", stop);
  };
  element.addEventListener("pointerdown", down);
  return () => element.removeEventListener("pointerdown", down);
}

/** Two fingers take along the moments that they were put on. */
export function onPinch(element: HTMLElement, store: Store): () => void {
  const fingers = new Map<number, { part: number; time: number }>();
  const partOf = (event: PointerEvent) => {
    const box = element.getBoundingClientRect();
    return (event.clientX - box.left) / box.width;
  };
  const anchor = () => {
    for (const finger of fingers.values()) finger.time = timeAt(store.window.value, finger.part);
  };
  const down = (event: PointerEvent) => {
    if (event.pointerType !== "touch") return;
    element.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, { part: partOf(event), time: 0 });
    anchor();
  };
  const move = (event: PointerEvent) => {
    const finger = fingers.get(event.pointerId);
    if (!finger) return;
    finger.part = partOf(event);
    const [one, other] = fingers.values();
    if (!one || !other || fingers.size > 2) return;
    const size = (one.time - other.time) / (one.part - other.part);
    // Fingers above each other, or past each other, say nothing about a length.
    if (!(size > 0 && size < Infinity)) return;
    const start = one.time - one.part * size;
    store.move({ start, end: start + size });
  };
  const up = (event: PointerEvent) => {
    if (fingers.delete(event.pointerId)) anchor();
  };
  const listening = new AbortController();
  const { signal } = listening;
  element.addEventListener("pointerdown", down, { signal });
  element.addEventListener("pointermove", move, { signal });
  element.addEventListener("pointerup", up, { signal });
  element.addEventListener("pointercancel", up, { signal });
  return () => listening.abort();
}

/** In the overview a press moves the window there, and a drag takes it along. */
export function onOverview(element: HTMLElement, store: Store): () => void {
  const down = (event: PointerEvent) => {
    if (event.button !== 0) return;
    const box = element.getBoundingClientRect();
    const time = (at: PointerEvent) => timeAt(store.bounds, (at.clientX - box.left) / box.width);
    const size = length(store.window.value);
    const inside = time(event) >= store.window.value.start && time(event) <= store.window.value.end;
    const grip = inside ? time(event) - store.window.value.start : size / 2;
    element.setPointerCapture(event.pointerId);
    const move = (at: PointerEvent) => store.move({ start: time(at) - grip, end: time(at) - grip + size });
    const stop = () => {
      element.removeEventListener("pointermove", move);
      element.removeEventListener("lostpointercapture", stop);
    };
    move(event);
    element.addEventListener("pointermove", move);
    element.addEventListener("lostpointercapture", stop);
  };
  element.addEventListener("pointerdown", down);
  return () => element.removeEventListener("pointerdown", down);
}

/** Pixels of a wheel's turn, whatever it counts in. */
const turned = (delta: number, mode: number): number => delta * (mode === 1 ? 16 : mode === 2 ? 400 : 1);

/**
 * The wheel zooms at the pointer with Ctrl or Cmd (a pinch too), pans sideways or with Shift, and else scrolls the rows;
 * where there is nothing to scroll it zooms.
 */
export function onWheel(element: HTMLElement, store: Store, scrolls: () => boolean): () => void {
  const wheel = (event: WheelEvent) => {
    const box = element.getBoundingClientRect();
    const sideways = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
    if (!event.ctrlKey && !event.metaKey && (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))) {
      event.preventDefault();
      store.window.value = pan(store.window.value, turned(sideways, event.deltaMode) / box.width, store.bounds);
      return;
    }
    if (!event.ctrlKey && !event.metaKey && scrolls()) return;
    event.preventDefault();
    const at = timeAt(store.window.value, (event.clientX - box.left) / box.width);
    const factor = Math.exp(turned(event.deltaY, event.deltaMode) * (event.ctrlKey ? 0.006 : 0.0025));
    store.window.value = zoom(store.window.value, factor, at, store.bounds);
  };
  element.addEventListener("wheel", wheel, { passive: false });
  return () => element.removeEventListener("wheel", wheel);
}

const HELD = new Set(["w", "a", "s", "d"]);

const typing = (target: EventTarget | null): boolean =>
  target instanceof HTMLElement && target.matches("input, select, textarea, [contenteditable]");

/** Keys that work wherever the focus is, but for fields one types in. `pointer` is where zooming holds still. */
export function onKeys(
  store: Store,
  commands: Readonly<Record<string, () => void>>,
  pointer: () => number,
): () => void {
  const held = new Set<string>();
  let last = 0;
  const go = (seconds: number) => {
    let next = store.window.value;
    const sideways = (held.has("d") ? 1 : 0) - (held.has("a") ? 1 : 0);
    const inward = (held.has("w") ? 1 : 0) - (held.has("s") ? 1 : 0);
    if (sideways) next = pan(next, sideways * PAN_SPEED * seconds, store.bounds);
    if (inward) next = zoom(next, Math.exp(-inward * ZOOM_SPEED * seconds), timeAt(next, pointer()), store.bounds);
    store.window.value = next;
  };
  const frame = (now: number) => {
    if (!held.size) return;
    go(Math.min((now - last) / 1000, 0.1));
    last = now;
    requestAnimationFrame(frame);
  };
  const down = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey || typing(event.target)) return;
    if (document.querySelector("dialog[open]")) return;
    const key = event.key.toLowerCase();
    if (HELD.has(key)) {
      event.preventDefault();
      if (event.repeat || held.has(key)) return;
      held.add(key);
      go(TAP);
      if (held.size === 1) {
        last = performance.now();
        requestAnimationFrame(frame);
      }
      return;
    }
    const command = commands[event.key];
    if (!command) return;
    event.preventDefault();
    command();
  };
  const up = (event: KeyboardEvent) => held.delete(event.key.toLowerCase());
  const release = () => held.clear();
  document.addEventListener("keydown", down);
  document.addEventListener("keyup", up);
  addEventListener("blur", release);
  return () => {
    document.removeEventListener("keydown", down);
    document.removeEventListener("keyup", up);
    removeEventListener("blur", release);
  };
}
