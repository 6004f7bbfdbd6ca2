/** The scope of totals and flame graph: modules or classes, CPU or GPU, a range or the whole recording. */
import type { ComponentChildren } from "preact";

import { formatDuration } from "../../format";
import { durationOf } from "../../layout/viewport";
import type { Store } from "../../store";

interface ChoiceProps<T extends string> {
  readonly label: string;
  readonly options: readonly (readonly [T, string])[];
  readonly value: T;
  readonly choose: (value: T) => void;
}

export function Choice<T extends string>({ label, options, value, choose }: ChoiceProps<T>) {
  return (
    <div class="choice" role="group" aria-label={label}>
      {options.map(([id, title]) => (
        <button key={id} type="button" aria-pressed={id === value} onClick={() => choose(id)}>
          {title}
        </button>
      ))}
    </div>
  );
}

/** @param children elements at its end */
export function Scope({ store, children }: { store: Store; children?: ComponentChildren }) {
  const range = store.range.value;
  return (
    <div class="scope">
      <Choice
        label="Group by"
        options={[
          ["module", "By module"],
          ["class", "By class"],
        ]}
        value={store.grouping.value}
        choose={store.groupBy}
      />
      {store.hasGpu && (
        <Choice
          label="Time on"
          options={[
            ["cpu", "CPU"],
            ["gpu", "GPU"],
          ]}
          value={store.device.value}
          choose={(device) => {
            store.device.value = device;
          }}
        />
      )}
      {range ? (
        <p>
          Selected range of {formatDuration(durationOf(range))}
          <button type="button" class="link" onClick={() => store.setRange(null)}>
            clear
          </button>
        </p>
      ) : (
        <p>The whole recording</p>
      )}
      {children}
    </div>
  );
}
