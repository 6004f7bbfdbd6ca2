/** Search over names: which names match, and the matching spans in time order. */
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

/** Indexes of the spans whose name matches, ascending. */
export function matchingSpans(spans: Spans, nameMatches: Uint8Array | null): Int32Array {
  if (!nameMatches) return new Int32Array(0);
  let count = 0;
  for (let i = 0; i < spans.count; i++) count += nameMatches[spans.name[i]];
  const result = new Int32Array(count);
  for (let i = 0, position = 0; i < spans.count; i++) if (nameMatches[spans.name[i]]) result[position++] = i;
  return result;
}

/** The match after (`direction` 1) or before (-1) a span, around the end; -1 where nothing matches. */
export function nextMatch(matches: Int32Array, span: number, direction: 1 | -1): number {
  if (!matches.length) return -1;
  if (direction === 1) return matches.find((i) => i > span) ?? matches[0];
  if (span < 0) return matches[matches.length - 1];
  return matches.findLast((i) => i < span) ?? matches[matches.length - 1];
}
