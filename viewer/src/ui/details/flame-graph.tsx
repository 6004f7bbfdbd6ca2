/** Cells of a call tree, with widths proportional to their totals; arrow keys move the focus. */
import { useRef } from "preact/hooks";

import type { CallTreeNode } from "../../analysis/merged-tree";
import { colorKey } from "../../color";
import { formatDuration } from "../../format";
import type { FlameCell } from "../../layout/flame-layout";
import type { Store } from "../../store";

/** Fractions of the graph's width: narrower cells have no text, or no duration in their text. */
const MIN_TEXT_WIDTH = 0.02;
const MIN_DURATION_WIDTH = 0.1;

/** The index of the next cell for an arrow key, -1 for none; undefined for other keys. */
function cellAfterKey(cells: readonly FlameCell[], index: number, key: string, upward: boolean): number | undefined {
  const { node, row } = cells[index];
  const inRow = (step: 1 | -1) => {
    for (let i = index + step; cells[i]; i += step) if (cells[i].row === row) return i;
    return -1;
  };
  const toParent = () => cells.findIndex((cell) => cell.node === node.parent);
  const toChild = () => cells.findIndex((cell) => cell.node.parent === node);
  if (key === "ArrowLeft") return inRow(-1);
  if (key === "ArrowRight") return inRow(1);
  if (key === "ArrowUp") return upward ? toChild() : toParent();
  if (key === "ArrowDown") return upward ? toParent() : toChild();
  return undefined;
}

interface FlameGraphProps {
  readonly store: Store;
  readonly cells: readonly FlameCell[];
  readonly label: string;
  /** The cell that Tab moves to. */
  readonly focused: CallTreeNode;
  readonly describe: (node: CallTreeNode) => string;
  readonly onPick: (node: CallTreeNode) => void;
  /** Whether the root is at the bottom. */
  readonly upward?: boolean;
  /** Nodes above this depth have no class, so they have no colour. */
  readonly firstColored: number;
}

export function FlameGraph(props: FlameGraphProps) {
  const { store, cells, label, focused, describe, onPick, upward = false, firstColored } = props;
  const graph = useRef<HTMLDivElement>(null);
  const lastRow = Math.max(0, ...cells.map((cell) => cell.row));
  const onKeyDown = (event: KeyboardEvent) => {
    const buttons = [...(graph.current?.children ?? [])] as HTMLElement[];
    const index = buttons.indexOf(event.target as HTMLElement);
    const target = index < 0 ? undefined : cellAfterKey(cells, index, event.key, upward);
    if (target === undefined) return;
    event.preventDefault();
    buttons[target]?.focus();
  };
  return (
    <div
      ref={graph}
      class="graph"
      role="group"
      aria-label={label}
      style={{ height: `calc(${lastRow + 1} * var(--cell))` }}
      onKeyDown={onKeyDown}
    >
      {cells.map(({ node, left, width, row }, i) => {
        const color = node.depth >= firstColored ? store.classColors.get(colorKey(node)) : undefined;
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
              top: `calc(${upward ? lastRow - row : row} * var(--cell))`,
              ...(color && { background: color.fill, color: color.ink }),
            }}
            onClick={() => onPick(node)}
          >
            {width > MIN_TEXT_WIDTH && `${node.label} ${width > MIN_DURATION_WIDTH ? formatDuration(node.total) : ""}`}
          </button>
        );
      })}
    </div>
  );
}
