/** The content of the page: the recording, or two of its steps side by side. */
import { computed, type ReadonlySignal, signal, untracked } from "@preact/signals";

import { compareSteps } from "./analysis/compare-steps";
import { createStore, type Store } from "./store";
import type { Trace } from "./trace/trace";

/** Indexes of two steps of the recording. */
export type StepPair = readonly [first: number, second: number];

export interface Session {
  /** The whole recording. */
  readonly whole: Store;
  readonly compared: ReadonlySignal<StepPair | null>;
  /** The store of the trace that is shown. */
  readonly store: ReadonlySignal<Store>;
  /** Show two steps side by side. For null or an invalid pair, show the whole recording. */
  readonly compare: (pair: StepPair | null) => void;
}

export function createSession(trace: Trace): Session {
  const whole = createStore(trace);
  const compared = signal<StepPair | null>(null);
  const store = computed(() => {
    if (!compared.value) return whole;
    const [first, second] = compared.value;
    return untracked(() => createStore(compareSteps(trace, [whole.steps[first], whole.steps[second]])));
  });
  const compare = (pair: StepPair | null) => {
    const next = pair && pair[0] !== pair[1] && pair.every((step) => whole.steps[step]) ? pair : null;
    if (String(next) !== String(compared.value)) compared.value = next;
  };
  return { whole, compared, store, compare };
}
