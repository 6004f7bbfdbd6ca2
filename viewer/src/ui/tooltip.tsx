/** What is under the pointer, beside it. */

/** What is under the pointer, and where the pointer is in CSS pixels of the page. */
export interface Hover {
  /** Index of the span, -1 where it is something else. */
  readonly span: number;
  readonly title: string;
  readonly detail: string;
  readonly x: number;
  readonly y: number;
}

/** CSS pixels between the pointer and the tooltip. */
const GAP_X = 12;
const GAP_Y = 16;

export function Tooltip({ hover }: { hover: { readonly value: Hover | null } }) {
  if (!hover.value) return null;
  const { title, detail, x, y } = hover.value;
  const horizontal = x > innerWidth * 0.6 ? { right: `${innerWidth - x + GAP_X}px` } : { left: `${x + GAP_X}px` };
  const vertical = y > innerHeight * 0.75 ? { bottom: `${innerHeight - y + GAP_X}px` } : { top: `${y + GAP_Y}px` };
  return (
    <div class="tooltip" aria-hidden="true" style={{ ...horizontal, ...vertical }}>
      <strong>{title}</strong>
      {detail && <span>{detail}</span>}
    </div>
  );
}
