"""A headless Chromium, driven over a pipe by the Chrome DevTools Protocol; needs nothing but the program."""

import itertools
import json
import os
import select
import shutil
import subprocess
import time

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1200,700",
    "--remote-debugging-pipe",
]
LIMIT_S = 60


class Browser:
    """One page.

    Args:
        folder: an empty one, for what the browser keeps.
    """

    def __init__(self, folder):
        (commands, self._out), (self._in, answers) = os.pipe(), os.pipe()
        # the browser reads from descriptor 3 and writes to 4
        script = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
        arguments = ["bash", "-c", script, PROGRAM, *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(arguments, pass_fds=(commands, answers), stderr=subprocess.DEVNULL)
        os.close(commands)
        os.close(answers)
        self._numbers, self._buffer, self._session = itertools.count(1), b"", {}

    def __enter__(self):
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        return self

    def __exit__(self, *exc):
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def open(self, url, condition):
        """Open a page and wait until a condition (JavaScript) holds in it."""
        self._call("Page.navigate", url=url)
        deadline = time.monotonic() + LIMIT_S
        while not self.ask(f"!!({condition})"):
            assert time.monotonic() < deadline, f"{condition} never held"
            time.sleep(0.05)

    def ask(self, expression):
        """The value of an expression in the page; None where it raises."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        return None if "exceptionDetails" in answer else answer["result"].get("value")

    def mouse(self, kind, x, y, **more):
        """Dispatch an event of the mouse, and wait for the next picture."""
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def click(self, x, y, count=1):
        """Click once or twice."""
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=count)

    def _call(self, method, **parameters):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + LIMIT_S
        while True:
            while b"\0" in self._buffer:
                text, self._buffer = self._buffer.split(b"\0", 1)
                answer = json.loads(text)
                if answer.get("id") == number:
                    assert "error" not in answer, answer
                    return answer["result"]
            ready, _, _ = select.select([self._in], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"the browser did not answer {method}"
            self._buffer += os.read(self._in, 1 << 16)
