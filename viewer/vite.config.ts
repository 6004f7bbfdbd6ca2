import { defineConfig } from "vitest/config";

import { singlePage } from "./single-page.ts";

export default defineConfig({
  base: "./",
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: {
    target: "es2022",
    cssTarget: "es2022",
    modulePreload: false,
    assetsInlineLimit: 0,
    reportCompressedSize: false,
  },
  plugins: [singlePage()],
  test: { include: ["src/**/*.test.ts"] },
});
