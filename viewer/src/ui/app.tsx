/** The page: its parts, and the keys that work everywhere. */
import { useEffect, useRef } from "preact/hooks";

import { onKeys } from "../input";
import type { Store } from "../store";
import { Help } from "./help";
import { Panel } from "./panel";
import { TIMELINE_ID, Timeline } from "./timeline";
import { SEARCH_ID, Toolbar } from "./toolbar";

export function App({ store, painted }: { store: Store; painted: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  const pointer = useRef({ part: 0.5 });
  const help = () => dialog.current?.showModal();

  useEffect(() => {
    const toOtherHalf = () => {
      const halves = store.halves(store.selected.value);
      if (halves.length > 1) store.select(halves[(halves.indexOf(store.selected.value) + 1) % halves.length]);
    };
    const onSelected = (act: (span: number) => void) => () => {
      if (store.selected.value >= 0) act(store.selected.value);
    };
    const clear = () => {
      store.select(-1);
      store.setRange(null);
    };
    return onKeys(
      store,
      {
        "0": store.showAll,
        "[": () => store.toStep(store.step.value - 1),
        "]": () => store.toStep(store.step.value + 1),
        "/": () => document.getElementById(SEARCH_ID)?.focus(),
        "?": help,
        n: () => store.find(1),
        N: () => store.find(-1),
        f: onSelected((span) => store.show(store.stretch(span))),
        l: toOtherHalf,
        m: onSelected((span) => store.setRange(store.stretch(span))),
        Escape: clear,
      },
      () => pointer.current.part,
    );
  }, [store]);

  return (
    <>
      <a class="skip" href={`#${TIMELINE_ID}`}>Skip to the timeline</a>
      <Toolbar store={store} help={help} />
      <main>
        <Timeline store={store} pointer={pointer.current} painted={painted} />
        <Panel store={store} />
      </main>
      <Help dialog={dialog} />
    </>
  );
}
