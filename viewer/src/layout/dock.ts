/** Where the details are: below the tracks or beside them. */

export type Dock = "below" | "beside";

/** A media query: the screens that have no room for both side by side. */
export const NARROW = "(max-width: 75rem)";

/** Rows that are higher than this fraction of the page would leave too little room below them. */
const MAX_ROWS = 0.5;
/** Of two sides, which are looked at together with their changes. */
const MAX_COMPARED_ROWS = 0.35;

/** Beside the tracks where there are many rows, so that both are seen; below few rows, which leave that room empty. */
export const initialDock = (pageHeight: number, rowsHeight: number, isComparison: boolean): Dock =>
  rowsHeight > pageHeight * (isComparison ? MAX_COMPARED_ROWS : MAX_ROWS) ? "beside" : "below";
