/** The aggregated flame graph: calls merged by path, as wide as their total. */
import { useComputed, useSignal } from "@preact/signals";
import { useRef } from "preact/hooks";
import { buildCallTree, type CallTreeNode, rootOf } from "../analysis/call-tree";
import { formatDuration, plural } from "../format";
import { type FlameCell, layoutFlame } from "../layout/flame-layout";
import type { Store } from "../store";
import { Scope } from "./scope";

/** Fractions of the graph's width: a narrower cell has no text, or no duration in it. */
const MIN_TEXT_WIDTH = 0.02;
const MIN_DURATION_WIDTH = 0.1;

/** The index of the cell that an arrow key leads to from another, -1 for none; undefined for other keys. */
function cellAfterKey(cells: readonly FlameCell[], index: number, key: string): number | undefined {
  const { node, row } = cells[index];
  const inRow = (step: 1 | -1) => {
    for (let i = index + step; cells[i]; i += step) if (cells[i].row === row) return i;
    return -1;
  };
  if (key === "ArrowLeft") return inRow(-1);
  if (key === "ArrowRight") return inRow(1);
  if (key === "ArrowUp") return cells.findIndex((cell) => cell.node === node.parent);
  if (key === "ArrowDown") return cells.findIndex((cell) => cell.node.parent === node);
  return undefined;
}

export function FlamePanel({ store }: { store: Store }) {
  const whole = useComputed(() =>
    buildCallTree(store.trace, store.groups.value, store.device.value, store.range.value),
  );
  const zoomed = useSignal<CallTreeNode | null>(null);
  const graph = useRef<HTMLDivElement>(null);
  // A node of a tree that was built for another range or grouping is no more.
  const focused = zoomed.value && rootOf(zoomed.value) === whole.value ? zoomed.value : whole.value;
  const cells = layoutFlame(focused);
  const rowCount = Math.max(0, ...cells.map((cell) => cell.row)) + 1;

  const describe = (node: CallTreeNode) => {
    const share = whole.value.total > 0 ? ((node.total / whole.value.total) * 100).toFixed(1) : "0";
    const details = `, self ${formatDuration(node.self)}, ${plural(node.spans, "span")}, ${node.title}`;
    return `${node.label} ${formatDuration(node.total)} (${share} %)${node.depth > 1 ? details : ""}`;
  };
  const onKeyDown = (event: KeyboardEvent) => {
    const buttons = [...(graph.current?.children ?? [])] as HTMLElement[];
    const index = buttons.indexOf(event.target as HTMLElement);
    const target = index < 0 ? undefined : cellAfterKey(cells, index, event.key);
    if (target === undefined) return;
    event.preventDefault();
    buttons[target]?.focus();
  };

  return (
    <>
      <Scope store={store} />
      <div
        ref={graph}
        class="graph"
        role="group"
        aria-label="Flame graph: arrow keys move, Enter zooms"
        style={{ height: `calc(${rowCount} * var(--cell))` }}
        onKeyDown={onKeyDown}
      >
        {cells.map(({ node, left, width, row }, i) => {
          const color = node.depth > 1 ? store.classColors.get(node.moduleClass || node.label) : undefined;
          return (
            <button
              key={i}
              type="button"
              tabIndex={node === focused ? 0 : -1}
              title={describe(node)}
              aria-label={describe(node)}
              class={node.depth < focused.depth ? "cell outer" : "cell"}
              style={{
                left: `${left * 100}%`,
                width: `${width * 100}%`,
                top: `calc(${row} * var(--cell))`,
                ...(color && { background: color.fill, color: color.ink }),
              }}
              onClick={() => {
                zoomed.value = node;
              }}
            >
              {width > MIN_TEXT_WIDTH &&
                `${node.label} ${width > MIN_DURATION_WIDTH ? formatDuration(node.total) : ""}`}
            </button>
          );
        })}
      </div>
      {!cells.length && <p class="hint">No span lies in this range.</p>}
    </>
  );
}
