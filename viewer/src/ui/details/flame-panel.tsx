/** Calls merged by path, with widths proportional to their totals: from the root, or around one module or class. */
import { useComputed, useSignal } from "@preact/signals";

import { buildCallTree } from "../../analysis/call-tree";
import { type CallTreeNode, rootOf } from "../../analysis/merged-tree";
import { buildSandwich } from "../../analysis/sandwich";
import { formatDuration, plural } from "../../format";
import { layoutFlame } from "../../layout/flame-layout";
import type { Store } from "../../store";
import { FlameGraph } from "./flame-graph";
import { Choice, Scope } from "./scope";

/** The root and the kinds of tracks are above this depth. */
const FIRST_GROUP_DEPTH = 2;

const share = (node: CallTreeNode, whole: CallTreeNode): string =>
  whole.total > 0 ? ((node.total / whole.total) * 100).toFixed(1) : "0";

function TopDown({ store }: { store: Store }) {
  const whole = useComputed(() =>
    buildCallTree(store.trace, store.groups.value, store.device.value, store.range.value),
  );
  const zoomed = useSignal<CallTreeNode | null>(null);
  // Nodes of a tree for an earlier range or grouping are not in this tree.
  const focused = zoomed.value && rootOf(zoomed.value) === whole.value ? zoomed.value : whole.value;
  const cells = layoutFlame(focused);
  const describe = (node: CallTreeNode) => {
    const details = `, self ${formatDuration(node.self)}, ${plural(node.spans, "span")}, ${node.title}`;
    const isGroup = node.depth >= FIRST_GROUP_DEPTH;
    return `${node.label} ${formatDuration(node.total)} (${share(node, whole.value)} %)${isGroup ? details : ""}`;
  };
  return (
    <>
      <FlameGraph
        store={store}
        cells={cells}
        label="Flame graph: arrow keys move, Enter zooms"
        focused={focused}
        describe={describe}
        firstColored={FIRST_GROUP_DEPTH}
        onPick={(node) => {
          zoomed.value = node;
        }}
      />
      {!cells.length && <p class="hint">No span lies in this range.</p>}
    </>
  );
}

function Around({ store, group }: { store: Store; group: number }) {
  const sandwich = useComputed(() => {
    const picked = store.pickedGroup.value ?? group;
    return buildSandwich(store.trace, store.groups.value, picked, store.device.value, store.range.value);
  });
  const { callers, callees } = sandwich.value;
  const describe = (node: CallTreeNode) =>
    `${node.label} ${formatDuration(node.total)} (${share(node, callees)} %), ${plural(node.spans, "span")}, ${node.title}`;
  const onPick = (node: CallTreeNode) => {
    const index = store.groups.value.groups.findIndex(({ title }) => title === node.title);
    if (index !== store.pickedGroup.value) store.pickGroup(index);
  };
  if (!callees.total) return <p class="hint">It has no call in this range.</p>;
  return (
    <>
      <FlameGraph
        store={store}
        cells={layoutFlame(callers)}
        label="What calls it: arrow keys move, Enter goes to a caller"
        focused={callers}
        describe={describe}
        firstColored={0}
        onPick={onPick}
        upward
      />
      <p class="hint">Above: what calls {callees.title}. Below: what it calls.</p>
      <FlameGraph
        store={store}
        cells={layoutFlame(callees)}
        label="What it calls: arrow keys move, Enter goes to a callee"
        focused={callees}
        describe={describe}
        firstColored={0}
        onPick={onPick}
      />
    </>
  );
}

export function FlamePanel({ store }: { store: Store }) {
  const picked = store.pickedGroup.value;
  const view = useSignal<"down" | "around">(picked === null ? "down" : "around");
  return (
    <>
      <Scope store={store}>
        <Choice
          label="Flame graph of"
          options={[
            ["down", "All, top down"],
            ["around", "One, callers and callees"],
          ]}
          value={view.value}
          choose={(next) => {
            view.value = next;
          }}
        />
      </Scope>
      {view.value === "down" && <TopDown store={store} />}
      {view.value === "around" && picked !== null && <Around store={store} group={picked} />}
      {view.value === "around" && picked === null && (
        <p class="hint">Pick a module or class in the table of modules to see what calls it and what it calls.</p>
      )}
    </>
  );
}
