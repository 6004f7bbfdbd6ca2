/** The aggregated flame graph: calls merged by path, as wide as their total. */
import { useComputed, useSignal } from "@preact/signals";
import { useRef } from "preact/hooks";

import { type Node, tree } from "../aggregate";
import { cellsOf, rootOf } from "../flame";
import type { Store } from "../store";
import { formatDuration, plural } from "../text";
import { Scope } from "./scope";

export function Flame({ store }: { store: Store }) {
  const whole = useComputed(() => tree(store.trace, store.groups.value, store.device.value, store.range.value));
  const zoomed = useSignal<Node | null>(null);
  const graph = useRef<HTMLDivElement>(null);
  // A node of a former tree is gone with it.
  const root = zoomed.value && rootOf(zoomed.value) === whole.value ? zoomed.value : whole.value;
  const cells = cellsOf(root);
  const rows = Math.max(0, ...cells.map((cell) => cell.row)) + 1;

  const words = (node: Node) => {
    const share = whole.value.total > 0 ? ((node.total / whole.value.total) * 100).toFixed(1) : "0";
    const more = node.depth > 1 ? `, self ${formatDuration(node.self)}, ${plural(node.slices, "slice")}, ${node.title}` : "";
    return `${node.label} ${formatDuration(node.total)} (${share} %)${more}`;
  };
  const keys = (event: KeyboardEvent) => {
    const at = cells.findIndex((_, i) => graph.current?.children[i] === event.target);
    if (at < 0) return;
    const { node, row } = cells[at];
    const inRow = (step: number) => {
      for (let i = at + step; cells[i]; i += step) if (cells[i].row === row) return i;
      return -1;
    };
    const target = {
      ArrowLeft: () => inRow(-1),
      ArrowRight: () => inRow(1),
      ArrowUp: () => cells.findIndex((cell) => cell.node === node.parent),
      ArrowDown: () => cells.findIndex((cell) => cell.node.parent === node),
    }[event.key];
    if (!target) return;
    event.preventDefault();
    (graph.current?.children[target()] as HTMLElement | undefined)?.focus();
  };

  return (
    <>
      <Scope store={store} />
      <div
        ref={graph}
        class="graph"
        role="group"
        aria-label="Flame graph: arrow keys move, Enter zooms"
        style={{ height: `calc(${rows} * var(--cell))` }}
        onKeyDown={keys}
      >
        {cells.map(({ node, left, width, row }, i) => {
          const color = node.depth > 1 ? store.colors.get(node.moduleClass || node.label) : undefined;
          return (
            <button
              key={i}
              type="button"
              tabIndex={node === root ? 0 : -1}
              title={words(node)}
              aria-label={words(node)}
              class={node.depth < root.depth ? "cell outer" : "cell"}
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
              {width > 0.02 ? `${node.label} ${width > 0.1 ? formatDuration(node.total) : ""}` : ""}
            </button>
          );
        })}
      </div>
      {!cells.length && <p class="hint">No slice lies in this range.</p>}
    </>
  );
}
