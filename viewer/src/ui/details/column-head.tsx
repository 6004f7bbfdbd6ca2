/** The head of a table's column that sorts the table. */
import type { Signal } from "@preact/signals";

import { Icon } from "../icons";

export interface Order<Key extends string> {
  readonly key: Key;
  readonly descending: boolean;
}

interface ColumnHeadProps<Key extends string> {
  readonly column: Key;
  readonly title: string;
  /** The meaning of the column, shown at its head. */
  readonly hint?: string;
  readonly order: Signal<Order<Key>>;
  /** Numbers are aligned right, and sorted largest first at the first click. */
  readonly isNumber?: boolean;
  readonly class?: string;
}

export function ColumnHead<Key extends string>(props: ColumnHeadProps<Key>) {
  const { column, title, hint, order, isNumber = false } = props;
  const { key, descending } = order.value;
  const sorted = key === column;
  return (
    <th
      scope="col"
      title={hint}
      class={isNumber ? "number" : (props.class ?? "")}
      aria-sort={!sorted ? "none" : descending ? "descending" : "ascending"}
    >
      <button
        type="button"
        onClick={() => {
          order.value = { key: column, descending: sorted ? !descending : isNumber };
        }}
      >
        {title}
        {sorted && (
          <span class={descending ? "sort" : "sort up"}>
            <Icon name="down" />
          </span>
        )}
      </button>
    </th>
  );
}
