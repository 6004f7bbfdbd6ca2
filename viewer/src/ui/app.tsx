/** The page: its parts, and the keys that work in all of it. */
import { useSignal } from "@preact/signals";
import { useEffect, useMemo, useRef } from "preact/hooks";

import { onKeys } from "../input/keyboard";
import { type Dock, initialDock, NARROW } from "../layout/dock";
import { rowsHeight } from "../layout/rows";
import type { Session } from "../session";
import type { Store } from "../store";
import { DetailsPanel } from "./details/details-panel";
import { Help } from "./help";
import { TIMELINE_ID, Timeline } from "./timeline";
import { SEARCH_ID, Toolbar } from "./toolbar";

const narrowScreen = matchMedia(NARROW);

/** The actions of keys; the help dialog lists them. */
function keyCommands(store: Store, openHelp: () => void): Readonly<Record<string, () => void>> {
  const selectNextLinked = () => {
    const linked = store.linkedSpans(store.selected.value);
    if (linked.length > 1) store.select(linked[(linked.indexOf(store.selected.value) + 1) % linked.length]);
  };
  const withSelected = (act: (span: number) => void) => () => {
    if (store.selected.value >= 0) act(store.selected.value);
  };
  return {
    "0": store.showAll,
    "[": () => store.toStep(store.previousStep.value),
    "]": () => store.toStep(store.nextStep.value),
    "/": () => document.getElementById(SEARCH_ID)?.focus(),
    "?": openHelp,
    n: () => store.selectMatch(1),
    N: () => store.selectMatch(-1),
    f: withSelected((span) => store.show(store.rangeOf(span))),
    l: selectNextLinked,
    m: withSelected((span) => store.setRange(store.rangeOf(span))),
    Escape: () => {
      const nothing = [store.range, store.pickedGroup, store.pickedChange].every(({ value }) => value === null);
      if (nothing && store.selected.value < 0) store.query.value = "";
      store.select(-1);
      store.setRange(null);
      store.pickedGroup.value = null;
      store.pickedChange.value = null;
    },
  };
}

interface PageProps {
  readonly session: Session;
  readonly onPainted: () => void;
}

/** The page of the current store; another recording or comparison has its own page. */
export function App({ session, onPainted }: PageProps) {
  return <Page key={String(session.compared.value)} session={session} onPainted={onPainted} />;
}

function Page({ session, onPainted }: PageProps) {
  const store = session.store.value;
  const dialog = useRef<HTMLDialogElement>(null);
  const pointer = useRef({ fraction: 0.5 });
  const openHelp = () => dialog.current?.showModal();

  // Decided only once: the panel must not move when rows are folded.
  const preferred = useSignal<Dock>(
    useMemo(() => initialDock(innerHeight, rowsHeight(store.rows.peek()), store.trace.comparison !== null), [store]),
  );
  const narrow = useSignal(narrowScreen.matches);
  const dock = narrow.value ? "below" : preferred.value;
  const setDock = (next: Dock) => {
    preferred.value = next;
  };

  useEffect(() => {
    const update = () => {
      narrow.value = narrowScreen.matches;
    };
    narrowScreen.addEventListener("change", update);
    return () => narrowScreen.removeEventListener("change", update);
  }, []);
  useEffect(() => onKeys(store, keyCommands(store, openHelp), () => pointer.current.fraction), [store]);

  return (
    <>
      <a class="skip" href={`#${TIMELINE_ID}`}>
        Skip to the timeline
      </a>
      <Toolbar store={store} session={session} openHelp={openHelp} />
      <main class={dock}>
        <Timeline store={store} pointer={pointer.current} onPainted={onPainted} />
        <DetailsPanel store={store} session={session} dock={dock} setDock={narrow.value ? undefined : setDock} />
      </main>
      <Help dialog={dialog} />
    </>
  );
}
