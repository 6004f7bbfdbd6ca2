/** A description of the item under the pointer, placed beside the pointer and inside the window. */
import { shortenFromLeft } from "../format";

/** The item under the pointer, and the pointer's position in CSS pixels of the page. */
export interface Hover {
  /** Index of the span, -1 for another item. */
  readonly span: number;
  readonly title: string;
  readonly detail: string;
  /** Further lines, with their colours if they have any. */
  readonly rows?: readonly { readonly color?: string; readonly name: string; readonly value: string }[];
  readonly x: number;
  readonly y: number;
}

/** CSS pixels between the pointer and the tooltip. */
const GAP_X = 12;
const GAP_Y = 16;
/** Beyond this fraction of the window, the tooltip is on the other side of the pointer. */
const FAR = 0.5;
/** Maximum number of characters of its texts. */
const TITLE_LIMIT = 120;
const DETAIL_LIMIT = 240;

export function Tooltip({ hover }: { hover: { readonly value: Hover | null } }) {
  if (!hover.value) return null;
  const { title, detail, rows = [], x, y } = hover.value;
  const horizontal = x > innerWidth * FAR ? { right: `${innerWidth - x + GAP_X}px` } : { left: `${x + GAP_X}px` };
  const vertical =
    y > innerHeight * FAR
      ? { bottom: `${innerHeight - y + GAP_X}px`, maxHeight: `${y - GAP_X}px` }
      : { top: `${y + GAP_Y}px`, maxHeight: `${innerHeight - y - GAP_Y}px` };
  return (
    <div class="tooltip" aria-hidden="true" style={{ ...horizontal, ...vertical }}>
      <strong>{shortenFromLeft(title, TITLE_LIMIT)}</strong>
      {detail && <span>{shortenFromLeft(detail, DETAIL_LIMIT)}</span>}
      {rows.map((row) => (
        <div key={row.name} class="tooltip-row">
          {row.color && <i class="color-swatch" style={{ background: row.color }} />}
          {shortenFromLeft(row.name, TITLE_LIMIT)}
          <b>{row.value}</b>
        </div>
      ))}
    </div>
  );
}
