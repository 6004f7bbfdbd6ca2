/** Keys, mouse, and what the marks on slices mean. */
import type { Ref } from "preact";

import { Icon } from "./icons";

const KEYS: readonly (readonly [string, string])[] = [
  ["W  S", "zoom in and out"],
  ["A  D", "pan left and right"],
  ["0", "show the whole recording"],
  ["[  ]", "previous and next step"],
  ["/", "search; Enter and Shift+Enter go through the finds"],
  ["N  Shift+N", "next and previous find"],
  ["← →  ↑ ↓", "on the timeline: neighbour, parent, first child"],
  ["F", "zoom to the selected slice"],
  ["L", "from a forward to its backward, and back"],
  ["M", "take the selected slice as the range"],
  ["Esc", "clear the selection and the range"],
];

const MOUSE: readonly (readonly [string, string])[] = [
  ["Click", "select a slice; a second click in a row zooms to it"],
  ["Drag", "pan"],
  ["Shift + drag", "select a range, as does a drag on the time axis"],
  ["Wheel", "scroll the tracks; zoom where all are in sight"],
  ["Ctrl + wheel, pinch", "zoom at the pointer, or between two fingers"],
  ["Shift + wheel", "pan"],
];

function List({ title, rows }: { title: string; rows: readonly (readonly [string, string])[] }) {
  return (
    <section>
      <h3>{title}</h3>
      <dl>
        {rows.map(([key, does]) => (
          <div key={key}>
            <dt>
              <kbd>{key}</kbd>
            </dt>
            <dd>{does}</dd>
          </div>
        ))}
      </dl>
    </section>
  );
}

export function Help({ dialog }: { dialog: Ref<HTMLDialogElement> }) {
  return (
    <dialog ref={dialog} class="help" aria-labelledby="help-title">
      <form method="dialog">
        <h2 id="help-title">Keys and legend</h2>
        <button class="quiet" aria-label="Close">
          <Icon name="close" />
        </button>
      </form>
      <div class="columns">
        <List title="Keys" rows={KEYS} />
        <div>
          <List title="Mouse" rows={MOUSE} />
          <section>
            <h3>Slices</h3>
            <ul class="legend">
              <li>One colour per module class; a class has the same colour in every recording.</li>
              <li>
                <span class="sample incomplete" /> Stripes: incomplete, its begin or end was not recorded.
              </li>
              <li>
                <span class="sample recompute" /> Dots: recompute, a forward run again during backward.
              </li>
              <li>
                <span class="sample flow" /> Arrow: from the selected call's forward to its backward.
              </li>
            </ul>
          </section>
        </div>
      </div>
    </dialog>
  );
}
