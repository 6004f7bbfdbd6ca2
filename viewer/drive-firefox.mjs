/**
 * Drives a stock Firefox for the tests: a command per line of standard input, its result as a line of JSON on standard
 * output. Usage: node drive-firefox.mjs EXECUTABLE
 */
import { createInterface } from "node:readline";
import puppeteer from "puppeteer-core";

const browser = await puppeteer.launch({
  browser: "firefox",
  executablePath: process.argv[2],
  headless: true,
  extraPrefsFirefox: { "general.smoothScroll": false },
});
const page = await browser.newPage();
// A Firefox with long-term support does not know every setting that this also requests, but it knows the size.
await page.setViewport({ width: 1600, height: 900 }).catch((error) => {
  if (!String(error).includes("unknown command")) throw error;
});
const errors = [];
page.on("pageerror", (error) => errors.push(String(error)));
page.on("console", (message) => {
  if (message.type() === "error") errors.push(message.text());
});

/**
 * Polls from here until `check` is true in the page. Waiting inside the page would evaluate text as code, which it
 * forbids.
 */
async function until(check, argument) {
  const end = Date.now() + 60_000;
  while (!(await page.evaluate(check, argument))) {
    if (Date.now() > end) throw new Error(`waited a minute for ${check}`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

/** Turns the wheel; resolves once the tracks have scrolled, which Firefox does on a thread of its own. */
async function wheel(deltaY) {
  const [before, room] = await page.evaluate((delta) => {
    const { scrollTop, scrollHeight, clientHeight } = document.querySelector(".scroller");
    return [scrollTop, delta > 0 ? scrollHeight - clientHeight - scrollTop : delta < 0 ? scrollTop : 0];
  }, deltaY);
  await page.mouse.wheel({ deltaY });
  if (room >= 1) {
    await until((top) => document.querySelector(".scroller").scrollTop !== top, before);
  }
}

const commands = {
  goto: (url) => page.goto(url).then(() => null),
  evaluate: (expression) => page.evaluate(expression),
  wait: (expression) => until(expression).then(() => null),
  click: (x, y) => page.mouse.click(x, y),
  press: (key) => page.keyboard.press(key),
  move: (x, y) => page.mouse.move(x, y),
  wheel,
  screenshot: () => page.screenshot({ encoding: "base64" }),
  errors: () => errors,
};

for await (const line of createInterface({ input: process.stdin })) {
  const [name, ...parameters] = JSON.parse(line);
  const answer = await Promise.resolve(commands[name](...parameters)).then(
    (result) => ({ result: result ?? null }),
    (error) => ({ error: String(error) }),
  );
  console.log(JSON.stringify(answer));
}
await browser.close();
