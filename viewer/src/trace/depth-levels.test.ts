import { expect, test } from "vitest";
import { makeTrace } from "../testing/make-trace";
import { buildDepthLevels, forEachRectangle, lowerBound, mergeCellNs, spanAt } from "./depth-levels";

const drawn = (
  times: [number, number][],
  from: number,
  to: number,
  nsPerPixel: number,
  highlighted: Uint8Array | null = null,
) => {
  const { spans } = makeTrace(times.map((time, i) => ({ time, name: `n${i}` })));
  const result: number[][] = [];
  forEachRectangle(buildDepthLevels(spans, 1)[0][0], spans, from, to, nsPerPixel, highlighted, (...box) =>
    result.push(box),
  );
  return result;
};

test("buildDepthLevels of nested spans makes one level per track and depth, in start order", () => {
  const { spans } = makeTrace(
    [
      { time: [0, 10], name: "a" },
      { time: [1, 4], name: "b", parent: 0 },
      { time: [2, 3], name: "c", track: 1 },
      { time: [5, 9], name: "d", parent: 0 },
    ],
    ["forward", "backward"],
  );
  const levels = buildDepthLevels(spans, 2);
  expect(levels.map((depths) => depths.map((level) => [...level.spans]))).toEqual([[[0], [1, 3]], [[2]]]);
  expect([...levels[0][1].latestEnd]).toEqual([4, 9]);
});

test("lowerBound of a limit is the first position that reaches it", () => {
  expect([0, 1, 2, 3, 9].map((limit) => lowerBound([1, 3, 3], limit))).toEqual([0, 0, 1, 1, 3]);
});

test("mergeCellNs of a pixel's time is a power of two and at least a pixel", () => {
  expect([1, 3, 4, 1000, 0.3].map(mergeCellNs)).toEqual([1, 4, 4, 1024, 0.5]);
});

test("forEachRectangle between two times leaves out spans outside of them", () => {
  expect(
    drawn(
      [
        [0, 10],
        [20, 30],
        [40, 50],
      ],
      15,
      35,
      1,
    ),
  ).toEqual([[1, 20, 30, 1]]);
});

test("forEachRectangle between two times draws spans that these cut as a whole", () => {
  expect(
    drawn(
      [
        [0, 20],
        [20, 40],
      ],
      10,
      25,
      1,
    ),
  ).toEqual([
    [0, 0, 20, 1],
    [1, 20, 40, 1],
  ]);
});

test("forEachRectangle of spans thinner than a pixel merges them under the longest", () => {
  expect(
    drawn(
      [
        [0, 1],
        [2, 5],
        [6, 7],
        [8, 9],
      ],
      0,
      100,
      8,
    ),
  ).toEqual([
    [1, 0, 7, 3],
    [3, 8, 9, 1],
  ]);
});

test("forEachRectangle of merged spans shows one that the search matches, however short", () => {
  expect(
    drawn(
      [
        [0, 1],
        [2, 5],
      ],
      0,
      100,
      8,
      Uint8Array.of(1, 0),
    ),
  ).toEqual([[0, 0, 5, 2]]);
});

test("forEachRectangle at a wide span ends what is merged", () => {
  expect(
    drawn(
      [
        [0, 1],
        [2, 20],
        [20, 21],
      ],
      0,
      100,
      8,
    ),
  ).toEqual([
    [0, 0, 1, 1],
    [1, 2, 20, 1],
    [2, 20, 21, 1],
  ]);
});

test("forEachRectangle in a moving viewport gives the same rectangles", () => {
  const spans = Array.from({ length: 400 }, (_, i): [number, number] => [i * 3, i * 3 + 2]);
  const inner = (boxes: number[][]) => boxes.filter(([, start, end]) => start >= 400 && end <= 800);
  expect(inner(drawn(spans, 401 - 10, 900, 8))).toEqual(inner(drawn(spans, 0, 1200, 8)));
});

test("spanAt a time finds the span there or the nearest within the tolerance", () => {
  const { spans } = makeTrace([
    { time: [10, 20], name: "a" },
    { time: [30, 31], name: "b" },
  ]);
  const [level] = buildDepthLevels(spans, 1)[0];
  expect([5, 9, 10, 20, 24, 28, 33, 40].map((time) => spanAt(level, spans, time, 3))).toEqual([
    -1, 0, 0, 0, -1, 1, 1, -1,
  ]);
});

test("spanAt the time of a span of no length finds it", () => {
  const { spans } = makeTrace([{ time: [10, 10], name: "a" }]);
  expect(spanAt(buildDepthLevels(spans, 1)[0][0], spans, 10, 0)).toBe(0);
});
