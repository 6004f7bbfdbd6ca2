/** Search over names: which names match, and the matching slices in time order. */
import type { Name, Spans } from "./trace";

/** One flag per name, 1 where each word of the query is in the label or the fqn, whatever its case; null for no query. */
export function matchingNames(names: readonly Name[], query: string): Uint8Array | null {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return null;
  return Uint8Array.from(names, ({ label, fqn }) => {
    const text = `${label}\n${fqn}`.toLowerCase();
    return words.every((word) => text.includes(word)) ? 1 : 0;
  });
}

/** Indexes of the spans whose name is wanted, ascending. */
export function finds(spans: Spans, wanted: Uint8Array | null): Int32Array {
  if (!wanted) return new Int32Array(0);
  let count = 0;
  for (let i = 0; i < spans.count; i++) count += wanted[spans.name[i]];
  const result = new Int32Array(count);
  for (let i = 0, at = 0; i < spans.count; i++) if (wanted[spans.name[i]]) result[at++] = i;
  return result;
}

/** The find after (`direction` 1) or before (-1) a span, around the end; -1 where nothing was found. */
export function nextFind(found: Int32Array, span: number, direction: 1 | -1): number {
  if (!found.length) return -1;
  if (direction === 1) return found.find((i) => i > span) ?? found[0];
  if (span < 0) return found[found.length - 1];
  return found.findLast((i) => i < span) ?? found[found.length - 1];
}
