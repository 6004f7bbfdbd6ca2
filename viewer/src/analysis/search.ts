/** Functions from match flags to matching spans, and from one match to the next. */

/** Indexes of the flagged spans, ascending. */
export function flaggedSpans(flags: Uint8Array | null): Int32Array {
  if (!flags) return new Int32Array(0);
  let count = 0;
  for (const flag of flags) count += flag;
  const result = new Int32Array(count);
  for (let i = 0, position = 0; i < flags.length; i++) if (flags[i]) result[position++] = i;
  return result;
}

/** The next (`direction` 1) or previous (-1) match from a span, wrapping around; -1 if nothing matches. */
export function nextMatch(matches: Int32Array, span: number, direction: 1 | -1): number {
  if (!matches.length) return -1;
  if (direction === 1) return matches.find((i) => i > span) ?? matches[0];
  if (span < 0) return matches[matches.length - 1];
  return matches.findLast((i) => i < span) ?? matches[matches.length - 1];
}
