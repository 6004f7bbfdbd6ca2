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
  // A turn of the wheel is over when it is answered.
  extraPrefsFirefox: { "general.smoothScroll": false },
});
const page = await browser.newPage();
await page.setViewport({ width: 1600, height: 900 });
const errors = [];
page.on("pageerror", (error) => errors.push(String(error)));
page.on("console", (message) => {
  if (message.type() === "error") errors.push(message.text());
});

const commands = {
  goto: (url) => page.goto(url).then(() => null),
  evaluate: (expression) => page.evaluate(expression),
  wait: (expression) => page.waitForFunction(expression, { timeout: 60_000 }).then(() => null),
  click: (x, y) => page.mouse.click(x, y),
  press: (key) => page.keyboard.press(key),
  move: (x, y) => page.mouse.move(x, y),
  wheel: (deltaY) => page.mouse.wheel({ deltaY }),
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
