/** Cuts labels to a width, by the widths of their characters in the context's font. */
export class LabelFitter {
  private readonly widths = new Map<string, number>();
  private readonly ellipsisWidth: number;

  constructor(private readonly context: CanvasRenderingContext2D) {
    this.ellipsisWidth = this.widthOf("…");
  }

  /**
   * Fit a label into `maxWidth` CSS pixels: the whole label, a part of it with an ellipsis, or an empty text if there
   * is no room for two characters.
   */
  fit(label: string, maxWidth: number): { text: string; width: number } {
    let width = 0;
    let cut = 0;
    let cutWidth = 0;
    let index = 0;
    for (const character of label) {
      width += this.widthOf(character);
      index += character.length;
      if (width + this.ellipsisWidth <= maxWidth) {
        cut = index;
        cutWidth = width;
      }
      if (width > maxWidth) {
        if (cut < 1) return { text: "", width: 0 };
        return { text: `${label.slice(0, cut)}…`, width: cutWidth + this.ellipsisWidth };
      }
    }
    return { text: label, width };
  }

  private widthOf(character: string): number {
    let width = this.widths.get(character);
    if (width === undefined) {
      width = this.context.measureText(character).width;
      this.widths.set(character, width);
    }
    return width;
  }
}
