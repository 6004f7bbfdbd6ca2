"""Saves a picture of modtrace's page once the page is drawn: picture.py PAGE.html OUT.png CHROMIUM [OPTION...].

Chromium is controlled by its own protocol over pipes; its option for pictures does not wait for the drawing.
"""

import base64
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_SIZE = {"width": 1600, "height": 900}
_DRAWN = """new Promise(done => {
    const look = () => document.documentElement?.dataset.ready
        ? requestAnimationFrame(() => requestAnimationFrame(done)) : requestAnimationFrame(look);
    look();
})"""


def main() -> None:
    page, out, *browser = sys.argv[1:]
    request_in, request_out = os.pipe()
    answer_in, answer_out = os.pipe()

    def give_pipes() -> None:
        # Chromium reads from descriptor 3 and writes to 4.
        ends = [os.dup(request_in), os.dup(answer_out)]
        os.dup2(ends[0], 3)
        os.dup2(ends[1], 4)

    running = subprocess.Popen([*browser, "--remote-debugging-pipe"], preexec_fn=give_pipes, pass_fds=(3, 4))
    os.close(answer_out)
    numbers = itertools.count(1)

    def ask(method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        number = next(numbers)
        session_field = {} if session is None else {"sessionId": session}
        os.write(
            request_out, json.dumps({"id": number, "method": method, "params": params} | session_field).encode() + b"\0"
        )
        message = b""
        while block := os.read(answer_in, 1 << 16):
            message += block
            *answers, message = message.split(b"\0")
            for answer in map(json.loads, answers):
                if answer.get("id") == number and "result" in answer:
                    return dict(answer["result"])
                if answer.get("id") == number:
                    raise SystemExit(f"{method}: {answer['error']['message']}")
        raise SystemExit("the browser has ended")

    try:
        target = ask("Target.createTarget", url="about:blank")["targetId"]
        session = ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        ask("Emulation.setDeviceMetricsOverride", session, deviceScaleFactor=1, mobile=False, **_SIZE)
        ask("Page.navigate", session, url=Path(page).resolve().as_uri())
        ask("Runtime.evaluate", session, expression=_DRAWN, awaitPromise=True)
        picture = ask("Page.captureScreenshot", session, format="png")["data"]
        Path(out).write_bytes(base64.b64decode(picture))
    finally:
        running.terminate()
        running.wait()


if __name__ == "__main__":
    main()
