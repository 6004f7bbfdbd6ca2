/** A long table's rows are shown a page at a time; a button below it shows more. */
import type { Signal } from "@preact/signals";

import { formatCount } from "../../format";

/** Number of rows shown at first, and added by each click. */
export const PAGE_ROWS = 200;

/** @param limit number of rows shown now */
export function MoreRows({ count, limit }: { count: number; limit: Signal<number> }) {
  if (count <= limit.value) return null;
  return (
    <button
      type="button"
      class="more"
      onClick={() => {
        limit.value += PAGE_ROWS;
      }}
    >
      {formatCount(count - limit.value)} more rows
    </button>
  );
}
