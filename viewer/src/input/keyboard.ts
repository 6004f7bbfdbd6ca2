/** Keys that work in the whole page, except in text fields. */
import { pan, timeAt, zoom } from "../layout/viewport";
import type { Store } from "../store";

/** Viewports per second while a pan key is held. */
const PAN_SPEED = 1.2;
/** Zoom by a factor of e to this power per second while a zoom key is held. */
const ZOOM_SPEED = 2.5;
/** A tap on a key counts as this many seconds of holding. */
const KEY_TAP_S = 0.06;
/** Maximum seconds of movement in one frame, for example after a pause of the page. */
const MAX_FRAME_S = 0.1;

/** Keys that move while they are held: zoom in and out, pan left and right. */
const HELD_KEYS = new Set(["w", "a", "s", "d"]);

const isTyping = (target: EventTarget | null): boolean =>
  target instanceof HTMLElement && target.matches("input, select, textarea, [contenteditable]");

/**
 * Listen to keys of the whole page.
 *
 * @param commands the action of each key, by `KeyboardEvent.key`
 * @param pointer the fraction of the viewport's width that keeps its time while zooming
 * @returns the cleanup function
 */
export function onKeys(
  store: Store,
  commands: Readonly<Record<string, () => void>>,
  pointer: () => number,
): () => void {
  const held = new Set<string>();
  let lastFrame = 0;
  let isMoving = false;
  const moveFor = (seconds: number) => {
    let next = store.viewport.value;
    const sideways = (held.has("d") ? 1 : 0) - (held.has("a") ? 1 : 0);
    const inward = (held.has("w") ? 1 : 0) - (held.has("s") ? 1 : 0);
    if (sideways) next = pan(next, sideways * PAN_SPEED * seconds, store.bounds);
    if (inward) next = zoom(next, Math.exp(-inward * ZOOM_SPEED * seconds), timeAt(next, pointer()), store.bounds);
    store.viewport.value = next;
  };
  const onFrame = (now: number) => {
    isMoving = held.size > 0;
    if (!isMoving) return;
    moveFor(Math.min((now - lastFrame) / 1000, MAX_FRAME_S));
    lastFrame = now;
    requestAnimationFrame(onFrame);
  };
  const hold = (key: string) => {
    held.add(key);
    moveFor(KEY_TAP_S);
    if (isMoving) return;
    isMoving = true;
    lastFrame = performance.now();
    requestAnimationFrame(onFrame);
  };
  const down = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
    if (document.querySelector("dialog[open]")) return;
    const key = event.key.toLowerCase();
    if (HELD_KEYS.has(key)) {
      event.preventDefault();
      if (!event.repeat && !held.has(key)) hold(key);
      return;
    }
    const command = commands[event.key];
    if (!command) return;
    event.preventDefault();
    command();
  };
  const listening = new AbortController();
  const { signal } = listening;
  document.addEventListener("keydown", down, { signal });
  document.addEventListener("keyup", (event) => held.delete(event.key.toLowerCase()), { signal });
  addEventListener("blur", () => held.clear(), { signal });
  return () => listening.abort();
}
