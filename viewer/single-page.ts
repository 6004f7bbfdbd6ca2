/** A Vite plugin: puts script and style into the page itself; the page forbids everything else. */
import { createHash } from "node:crypto";

import type { Plugin } from "vite";

const source = (text: string) => `'sha256-${createHash("sha256").update(text).digest("base64")}'`;

/** JavaScript that is safe inside a script element: it contains neither the end tag nor the start of a comment. */
const embeddable = (code: string) => code.replace(/<\/(script)/gi, "<\\/$1").replace(/<!--/g, "\\x3C!--");

export function singlePage(): Plugin {
  return {
    name: "single-page",
    enforce: "post",
    generateBundle(_options, bundle) {
      let script = "";
      let style = "";
      for (const [file, part] of Object.entries(bundle)) {
        if (part.type === "chunk") script += embeddable(part.code.trim());
        else if (file.endsWith(".css")) style += String(part.source).trim();
        else continue;
        delete bundle[file];
      }
      const page = bundle["index.html"];
      if (page?.type !== "asset") throw new Error("the build made no index.html");
      // Only this script and this style run; without connect-src, img-src … nothing can reach a network.
      const policy = [
        "default-src 'none'",
        `script-src ${source(script)}`,
        `style-src ${source(style)}`,
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
      ].join("; ");
      page.source = String(page.source)
        .replace(/\s*<(script type="module"|link rel="stylesheet") crossorigin [^>]*>(<\/script>)?/g, "")
        .replace("<!--policy-->", () => `<meta http-equiv="Content-Security-Policy" content="${policy}">`)
        .replace("<!--style-->", () => `<style>${style}</style>`)
        .replace("<!--script-->", () => `<script type="module">${script}</script>`);
    },
  };
}
