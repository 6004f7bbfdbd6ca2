/** The position of the details: below the tracks or beside them. */

export type Dock = "below" | "beside";

/** A media query for screens that are too narrow for both side by side. */
export const NARROW = "(max-width: 75rem)";

/** Maximum height of the rows, as a fraction of the page, that leaves enough room below them. */
const MAX_ROWS = 0.5;
/** The limit for a comparison of two sides. */
const MAX_COMPARED_ROWS = 0.35;

/** Beside the tracks if there are many rows, so that both are visible; otherwise below, in the free space. */
export const initialDock = (pageHeight: number, rowsHeight: number, isComparison: boolean): Dock =>
  rowsHeight > pageHeight * (isComparison ? MAX_COMPARED_ROWS : MAX_ROWS) ? "beside" : "below";
