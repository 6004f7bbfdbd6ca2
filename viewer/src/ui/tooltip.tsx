/** What is under the pointer, beside it. */
import type { Store } from "../store";
import { describeSpan } from "./describe-span";

/** A span under the pointer, and where the pointer is in CSS pixels of the page. */
export interface Hover {
  readonly span: number;
  readonly x: number;
  readonly y: number;
}

/** CSS pixels between the pointer and the tooltip. */
const GAP_X = 12;
const GAP_Y = 16;

export function Tooltip({ store, hover }: { store: Store; hover: { readonly value: Hover | null } }) {
  if (!hover.value) return null;
  const { span, x, y } = hover.value;
  const horizontal = x > innerWidth * 0.6 ? { right: `${innerWidth - x + GAP_X}px` } : { left: `${x + GAP_X}px` };
  const vertical = y > innerHeight * 0.75 ? { bottom: `${innerHeight - y + GAP_X}px` } : { top: `${y + GAP_Y}px` };
  const { fqn } = store.trace.names[store.trace.spans.name[span]];
  return (
    <div class="tooltip" aria-hidden="true" style={{ ...horizontal, ...vertical }}>
      <strong>{describeSpan(store.trace, span)}</strong>
      {fqn && <span>{fqn}</span>}
    </div>
  );
}
