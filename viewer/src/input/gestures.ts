/**
 * Mouse, touch and wheel on the timeline, which move the viewport and the range. Each function returns its cleanup
 * function.
 */
import { durationOf, pan, timeAt, zoom } from "../layout/viewport";
import type { Store } from "../store";
import type { TimeRange } from "../trace/trace";

/** A press that moves by less than this is a click. */
const CLICK_PIXELS = 4;
/** Zoom factor e per pixel of the wheel; a pinch on a touchpad arrives as small turns with Ctrl. */
const WHEEL_ZOOM_PER_PIXEL = 0.0025;
const PINCH_ZOOM_PER_PIXEL = 0.006;

const DELTA_LINE = 1;
const DELTA_PAGE = 2;
const LINE_PIXELS = 16;
const PAGE_PIXELS = 400;

type Stop = () => void;
type DragMode = "pan" | "range";

/** Horizontal position of a pointer in an element: 0 left, 1 right. */
export function fractionAt(element: HTMLElement, point: { readonly clientX: number }): number {
  const box = element.getBoundingClientRect();
  return (point.clientX - box.left) / box.width;
}

const ordered = (a: number, b: number): TimeRange => ({ start: Math.min(a, b), end: Math.max(a, b) });

export interface DragOptions {
  readonly mode: (event: PointerEvent) => DragMode;
  /** Called with the vertical distance of a pan in CSS pixels. */
  readonly scroll?: (pixels: number) => void;
  readonly click: (event: PointerEvent) => void;
}

/** Handle presses on an element: a drag pans or selects a range; clicks are passed on. */
export function onDrag(element: HTMLElement, store: Store, options: DragOptions): Stop {
  const down = (press: PointerEvent) => {
    if (press.button !== 0 || !press.isPrimary) return;
    const mode = options.mode(press);
    const viewportBefore = store.viewport.value;
    const pressFraction = fractionAt(element, press);
    const pressTime = timeAt(viewportBefore, pressFraction);
    let lastY = press.clientY;
    let dragging = false;
    element.setPointerCapture(press.pointerId);
    const listening = new AbortController();
    const move = (event: PointerEvent) => {
      if (event.pointerId !== press.pointerId) return;
      const distance = Math.hypot(event.clientX - press.clientX, event.clientY - press.clientY);
      if (!dragging && distance < CLICK_PIXELS) return;
      dragging = true;
      const fraction = fractionAt(element, event);
      if (mode === "range") {
        store.setRange(ordered(pressTime, timeAt(store.viewport.value, fraction)));
        return;
      }
      element.dataset.dragging = "";
      const shift = (fraction - pressFraction) * durationOf(viewportBefore);
      store.moveTo({ start: viewportBefore.start - shift, end: viewportBefore.end - shift });
      options.scroll?.(lastY - event.clientY);
      lastY = event.clientY;
    };
    const end = (event: PointerEvent) => {
      // A second finger ends the drag and starts a pinch; later events of that finger do not belong to the drag.
      const samePointer = event.pointerId === press.pointerId;
      if (samePointer === (event.type === "pointerdown")) return;
      listening.abort();
      delete element.dataset.dragging;
      if (samePointer && !dragging && event.type === "pointerup") options.click(event);
    };
    const { signal } = listening;
    element.addEventListener("pointermove", move, { signal });
    for (const type of ["pointerdown", "pointerup", "pointercancel"] as const) {
      element.addEventListener(type, end, { signal });
    }
  };
  element.addEventListener("pointerdown", down);
  return () => element.removeEventListener("pointerdown", down);
}

/** Pinch with two fingers: the time under each finger stays there. */
export function onPinch(element: HTMLElement, store: Store): Stop {
  const fingers = new Map<number, { fraction: number; time: number }>();
  const anchor = () => {
    for (const finger of fingers.values()) finger.time = timeAt(store.viewport.value, finger.fraction);
  };
  const down = (event: PointerEvent) => {
    if (event.pointerType !== "touch") return;
    element.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, { fraction: fractionAt(element, event), time: 0 });
    anchor();
  };
  const move = (event: PointerEvent) => {
    const finger = fingers.get(event.pointerId);
    if (!finger) return;
    finger.fraction = fractionAt(element, event);
    const [one, other] = fingers.values();
    if (!one || !other || fingers.size > 2) return;
    const duration = (one.time - other.time) / (one.fraction - other.fraction);
    // Fingers with the same or swapped horizontal positions determine no duration.
    if (!(duration > 0 && duration < Infinity)) return;
    const start = one.time - one.fraction * duration;
    store.moveTo({ start, end: start + duration });
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

/** A press in the overview moves the viewport there; a drag moves it further. */
export function onOverview(element: HTMLElement, store: Store): Stop {
  const down = (press: PointerEvent) => {
    if (press.button !== 0) return;
    const time = (event: PointerEvent) => timeAt(store.bounds, fractionAt(element, event));
    const { start, end } = store.viewport.value;
    const duration = end - start;
    const inside = time(press) >= start && time(press) <= end;
    const grip = inside ? time(press) - start : duration / 2;
    element.setPointerCapture(press.pointerId);
    const move = (event: PointerEvent) =>
      store.moveTo({ start: time(event) - grip, end: time(event) - grip + duration });
    const listening = new AbortController();
    const { signal } = listening;
    move(press);
    element.addEventListener("pointermove", move, { signal });
    element.addEventListener("lostpointercapture", () => listening.abort(), { signal });
  };
  element.addEventListener("pointerdown", down);
  return () => element.removeEventListener("pointerdown", down);
}

/** The turn of a wheel in CSS pixels, for each unit of the event. */
function wheelPixels(delta: number, mode: number): number {
  return delta * (mode === DELTA_LINE ? LINE_PIXELS : mode === DELTA_PAGE ? PAGE_PIXELS : 1);
}

/**
 * With Ctrl or Cmd (or a touchpad's pinch) the wheel zooms at the pointer. Sideways or with Shift it pans. Otherwise it
 * scrolls the rows, or zooms if `canScroll` returns false.
 */
export function onWheel(element: HTMLElement, store: Store, canScroll: () => boolean): Stop {
  const wheel = (event: WheelEvent) => {
    const zooms = event.ctrlKey || event.metaKey;
    if (!zooms && (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))) {
      event.preventDefault();
      const sideways = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
      const fraction = wheelPixels(sideways, event.deltaMode) / element.getBoundingClientRect().width;
      store.viewport.value = pan(store.viewport.value, fraction, store.bounds);
      return;
    }
    if (!zooms && canScroll()) return;
    event.preventDefault();
    const perPixel = event.ctrlKey ? PINCH_ZOOM_PER_PIXEL : WHEEL_ZOOM_PER_PIXEL;
    const factor = Math.exp(wheelPixels(event.deltaY, event.deltaMode) * perPixel);
    const fixed = timeAt(store.viewport.value, fractionAt(element, event));
    store.viewport.value = zoom(store.viewport.value, factor, fixed, store.bounds);
  };
  element.addEventListener("wheel", wheel, { passive: false });
  return () => element.removeEventListener("wheel", wheel);
}
