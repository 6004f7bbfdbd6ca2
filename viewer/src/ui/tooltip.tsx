/** What is under the pointer, beside it and inside the window. */
import { shortenFromLeft } from "../format";

/** What is under the pointer, and where the pointer is in CSS pixels of the page. */
export interface Hover {
  /** Index of the span, -1 where it is something else. */
  readonly span: number;
  readonly title: string;
  readonly detail: string;
  /** Lines below, with their colours if they have any. */
  readonly rows?: readonly { readonly color?: string; readonly name: string; readonly value: string }[];
  readonly x: number;
  readonly y: number;
}

/** CSS pixels between the pointer and the tooltip. */
const GAP_X = 12;
const GAP_Y = 16;
/** Beyond this part of the window it stands on the other side of the pointer. */
const FAR = 0.5;
/** Characters of its texts. */
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
