/** The choice of the span colours, and the legend if they show a cost. */
import { COST_NAMES, type Cost, formatCost, SHADES } from "../../analysis/costs";
import { GIVEN_HUE, shades, TAKEN_HUE, UNKNOWN } from "../../color";
import type { ColorBy, Store } from "../../store";
import { Choice } from "./scope";

const TITLES: Readonly<Record<ColorBy, string>> = {
  change: "Colour by change",
  class: "Colour by class",
  ...COST_NAMES,
};
const MEANINGS: Readonly<Record<Cost, string>> = {
  retained: "held at the end less at the begin; blue: given back",
  peak: "the most held inside less at the begin",
  flops: "FLOPs of the call by the time of its spans",
};

/** A scale from pale to deep; mirrored for freed memory. */
function Scale({ hue, mirrored }: { hue: number; mirrored?: boolean }) {
  const colors = shades(hue, SHADES).map(({ fill }) => fill);
  if (mirrored) colors.reverse();
  return <span class="scale" style={{ background: `linear-gradient(90deg, ${colors.join(", ")})` }} />;
}

function Legend({ store }: { store: Store }) {
  const { cost, ofSpan, most } = store.coloredCost.value!;
  return (
    <p class="shades">
      <span>
        {ofSpan.some((value) => value < 0) && <Scale hue={GIVEN_HUE} mirrored />}
        <Scale hue={TAKEN_HUE} />
        {cost === "flops" ? "in equal shades" : "each shade is twice the one before"}, up to {formatCost(cost, most)}
      </span>
      <span>{MEANINGS[cost]}</span>
      <span>
        <span class="color-swatch" style={{ background: UNKNOWN.fill }} />
        unknown
      </span>
    </p>
  );
}

export function ColorChoice({ store }: { store: Store }) {
  const { colorings, colorBy } = store;
  return (
    <>
      <Choice
        label="Colour spans by"
        options={colorings.map((by) => [by, TITLES[by]] as const)}
        value={colorBy.value}
        choose={(by) => {
          colorBy.value = by;
        }}
      />
      {store.coloredCost.value && <Legend store={store} />}
    </>
  );
}
