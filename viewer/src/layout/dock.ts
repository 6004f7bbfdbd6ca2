/** Where the details are: below the tracks or beside them. */

export type Dock = "below" | "beside";

/** A media query: the screens that have no room for both side by side. */
export const NARROW = "(max-width: 75rem)";

/** Rows that are higher than this fraction of the page would leave too little room below them. */
const MAX_ROWS = 0.5;

/** Beside the tracks where there are many rows, so that both are seen; below few rows, which leave that room empty. */
export const initialDock = (pageHeight: number, rowsHeight: number): Dock =>
  rowsHeight > pageHeight * MAX_ROWS ? "beside" : "below";
