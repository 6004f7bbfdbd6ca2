/** Paints the highlights of the pointer and the selection: outlines of spans, and the flow from forward to backward. */
import { type Box, type Frame, spanBox } from "./frame";

const HOVER_LINE = 1;
const LINKED_LINE = 2;
const SELECTED_LINE = 2.5;
/** Outlines are cut this far outside the canvas, so that the cut edges are not visible. */
const BLEED = 4;
const FLOW_LINE = 2;
const ARROW_HEAD = { length: 8, halfWidth: 4.5 };
/** A flow is not painted if both of its ends are this far outside the canvas. */
const MAX_FLOW_OVERHANG = 200;

/**
 * Paint the outlines of the hovered span (-1 for none), of the selected one, and of the spans linked to the selected
 * one.
 */
export function paintHighlights(frame: Frame, hovered: number): void {
  const { store, colors } = frame;
  const selected = store.selected.value;
  if (hovered >= 0 && hovered !== selected) outline(frame, hovered, colors.ink, HOVER_LINE);
  if (selected < 0) return;
  paintFlows(frame, selected);
  for (const span of store.linkedSpans(selected)) {
    if (span !== selected) outline(frame, span, colors.flow, LINKED_LINE);
  }
  outline(frame, selected, colors.accent, SELECTED_LINE);
}

function outline(frame: Frame, span: number, color: string, line: number): void {
  const { context, width } = frame;
  const box = spanBox(frame, span);
  if (!box || box.right < 0 || box.left > width) return;
  const left = Math.max(box.left, -BLEED);
  const right = Math.min(box.right, width + BLEED);
  context.strokeStyle = color;
  context.lineWidth = line;
  const inset = line / 2 - 1;
  context.strokeRect(left + inset, box.top + inset, Math.max(right - left - line + 1, 1), box.height + 2 - line);
}

/** Curves from the forward of the selected call to each span of its backward. */
function paintFlows(frame: Frame, selected: number): void {
  const { store } = frame;
  const { spans, tracks } = store.trace;
  const isForward = (span: number) => tracks[spans.track[span]].kind === "forward";
  const linked = store.linkedSpans(selected);
  for (const source of linked.filter(isForward)) {
    for (const target of linked.filter((span) => !isForward(span))) {
      const [from, to] = [spanBox(frame, source), spanBox(frame, target)];
      if (from && to) paintFlow(frame, from, to);
    }
  }
}

function paintFlow({ context, colors, width }: Frame, from: Box, to: Box): void {
  const [x0, y0] = [from.right, from.top + from.height / 2];
  const [x1, y1] = [to.left, to.top + to.height / 2];
  if (Math.max(x0, x1) < -MAX_FLOW_OVERHANG || Math.min(x0, x1) > width + MAX_FLOW_OVERHANG) return;
  const bend = Math.min(Math.max(Math.abs(x1 - x0) / 2, 24), 160);
  context.strokeStyle = colors.flow;
  context.fillStyle = colors.flow;
  context.lineWidth = FLOW_LINE;
  context.beginPath();
  context.moveTo(x0, y0);
  context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1 - 5, y1);
  context.stroke();
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x1 - ARROW_HEAD.length, y1 - ARROW_HEAD.halfWidth);
  context.lineTo(x1 - ARROW_HEAD.length, y1 + ARROW_HEAD.halfWidth);
  context.fill();
}
