import { expect, test } from "vitest";

import { decodeView, encodeView, type ViewState } from "./url-state";

const FULL: ViewState = {
  compare: [3, 11],
  viewport: { start: -12.5, end: 1_234_567.891 },
  range: { start: 0, end: 20 },
  selected: 41,
  tab: "flame",
  query: "/h\\.0 & =/ class:Linear",
  by: "class",
  on: "gpu",
  levels: 3,
  folded: ["track 0", "process 1"],
  group: 7,
  change: 5,
  color: "class",
};

test("encodeView of a full view reads as parameters that decodeView reads back", () => {
  const hash = encodeView(FULL);
  expect(hash).toMatch(/^compare=3,11&view=-12.5,1234567.891&range=0,20&span=41&tab=flame&search=/);
  expect(decodeView(`#${hash}`)).toEqual(FULL);
});

test("decodeView of a part of the parameters has these alone", () => {
  expect(decodeView("#tab=modules")).toEqual({ tab: "modules" });
  expect(decodeView("")).toEqual({});
});

test("decodeView of what encodeView never writes leaves it out", () => {
  const hash =
    "#view=5,3&range=1&span=-2&tab=nothing&by=x&on=y&levels=all&fold=track,evil-1,<b>&timeline&compare=1&color=red&change=-1";
  expect(decodeView(hash)).toEqual({});
  expect(decodeView("#view=1,2,3&range=,5&span=1e3")).toEqual({});
});
