import { expect, test } from "vitest";
import { initialDock } from "./dock";

test("initialDock puts the details beside rows that take more than half of the page", () => {
  expect(initialDock(900, 450, false)).toBe("below");
  expect(initialDock(900, 451, false)).toBe("beside");
});

test("initialDock puts changes beside sides that take more than a third", () => {
  expect(initialDock(1000, 350, true)).toBe("below");
  expect(initialDock(1000, 351, true)).toBe("beside");
});
