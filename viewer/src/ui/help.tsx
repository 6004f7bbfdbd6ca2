/** The dialog that lists keys, mouse gestures and the legend. */
import type { Ref } from "preact";

import { Icon } from "./icons";

const KEYS: readonly (readonly [string, string])[] = [
  ["W  S", "zoom in and out"],
  ["A  D", "pan left and right"],
  ["0", "show the whole recording"],
  ["[  ]", "previous and next step"],
  ["← →  Enter", "on the bars of the steps: from bar to bar; zoom to the step"],
  ["/", "search; Enter and Shift+Enter go through the matches, and all keys work again"],
  ["N  Shift+N", "next and previous match"],
  ["← →  ↑ ↓", "on the timeline: neighbour, parent, first child"],
  ["F", "zoom to the selected span"],
  ["L", "from a forward to its backward, and back"],
  ["M", "take the selected span as the range"],
  ["Esc", "clear the selection and the range; then the search"],
];

const MOUSE: readonly (readonly [string, string])[] = [
  ["Click", "select a span; a second click in a row zooms to it"],
  ["Drag", "pan"],
  ["Shift + drag", "select a range, as does a drag on the time axis"],
  ["Wheel", "scroll the tracks; zoom where all are in sight"],
  ["Ctrl + wheel, pinch", "zoom at the pointer, or between two fingers"],
  ["Shift + wheel", "pan"],
];

const SEARCH: readonly (readonly [string, string])[] = [
  ["attn", "spans whose name or path holds the word"],
  ["/h\\.\\d+$/", "… matches the regular expression"],
  ["class:Linear", "of a module class that holds the text"],
  ["phase:backward", "of the phase, or phase:gpu"],
  [">1ms  <20us", "longer or shorter than that"],
];

function List({ title, rows }: { title: string; rows: readonly (readonly [string, string])[] }) {
  return (
    <section>
      <h3>{title}</h3>
      <dl>
        {rows.map(([key, action]) => (
          <div key={key}>
            <dt>
              <kbd>{key}</kbd>
            </dt>
            <dd>{action}</dd>
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
        <button type="submit" class="icon-button" aria-label="Close">
          <Icon name="close" />
        </button>
      </form>
      <div class="columns">
        <div>
          <List title="Keys" rows={KEYS} />
          <List title="Search, all terms together" rows={SEARCH} />
        </div>
        <div>
          <List title="Mouse" rows={MOUSE} />
          <section>
            <h3>Spans</h3>
            <ul class="legend">
              <li>One colour per module class; a class has the same colour in every recording.</li>
              <li>
                <span class="legend-swatch incomplete" /> Stripes: incomplete, its start or end was not recorded.
              </li>
              <li>
                <span class="legend-swatch recompute" /> Dots: recompute, a forward run again during backward.
              </li>
              <li>
                <span class="legend-swatch flow" /> Flow: from the selected call's forward to its backward.
              </li>
            </ul>
          </section>
        </div>
      </div>
    </dialog>
  );
}
