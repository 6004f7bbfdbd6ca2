import { expect, test } from "vitest";
import { initialDock } from "./dock";

test("initialDock puts the details beside rows that take more than half of the page", () => {
  expect(initialDock(900, 450)).toBe("below");
  expect(initialDock(900, 451)).toBe("beside");
});
