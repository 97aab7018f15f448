"""Pages in headless Chromium, without a network: what it draws, and a tab that a test clicks and types in."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
from collections import Counter
from contextlib import contextmanager, suppress
from html.parser import HTMLParser
from itertools import count

import pytest
from waiting import PATIENCE_SECONDS

ALL_DRAWN = """
new Promise((done) => {
  const isDrawn = (plot) => plot.querySelector(".main-svg") || plot.textContent;
  const look = () => ([...document.querySelectorAll(".plot")].every(isDrawn) ? done() : setTimeout(look, 20));
  look();
})
"""
"""Resolves when Plotly has drawn every figure, or the page says why not."""


def command(profile, *options):
    """Return the command line of a headless Chromium; ``profile`` is a folder it may use."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        missing = pytest.fail if "CI" in os.environ else pytest.skip
        missing("no Chromium on this machine (Debian package 'chromium')")
    return [
        chromium,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--user-data-dir={profile}",
        *options,
    ]


def drawn_figures(page, profile):
    """Count what Chromium draws in each figure of a page, by title; ``profile`` is a folder it may use."""
    options = ("--virtual-time-budget=10000", "--dump-dom", page.as_uri())
    dom = subprocess.run(
        command(profile, *options), capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS
    ).stdout
    return Drawn(dom).figures


class Drawn(HTMLParser):
    """Counts of the marks that Plotly has drawn, by figure title."""

    def __init__(self, dom):
        super().__init__()
        self.figures = {}
        self.feed(dom)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        classes = (values.get("class") or "").split()
        if "plot" in classes:
            self.figures[values["aria-label"].split(".")[0]] = Counter()
        elif self.figures:
            kinds = {"main-svg", "point", "trace", "xtitle", "ytitle", "y2title", "errorbar"}
            self.figures[list(self.figures)[-1]].update(kinds.intersection(classes))


class Browser:
    """A Chromium that speaks the DevTools protocol through two pipes, its file descriptors 3 and 4."""

    def __init__(self, profile):
        commands, self.into = os.pipe()
        self.answers, answers = os.pipe()
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands, answers)]  # so that 3 and 4 are free
        plumb = f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}'
        options = command(profile, "--remote-debugging-pipe", "--hide-scrollbars", "--force-color-profile=srgb")
        self.process = subprocess.Popen(
            ["bash", "-c", plumb, "bash", *options], pass_fds=theirs, stderr=subprocess.DEVNULL
        )
        for end in (commands, answers, *theirs):
            os.close(end)
        self.ids, self.unread, self.events = count(1), b"", []

    def call(self, method, session=None, /, **params):
        """Send a command and return its result; keep the events that come before it."""
        number = next(self.ids)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self.into, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self.events.append(answer)
        if "error" in answer:
            raise AssertionError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def wait_for(self, method, session):
        """Return when the tab has sent this event."""
        while not any(event["method"] == method and event.get("sessionId") == session for event in self.events):
            self.events.append(self._next())

    def _next(self):
        while b"\0" not in self.unread:
            ready, _, _ = select.select([self.answers], [], [], PATIENCE_SECONDS)
            got = os.read(self.answers, 1 << 20) if ready else b""
            if not got:
                raise AssertionError(f"Chromium has not answered in {PATIENCE_SECONDS} s, or has ended")
            self.unread += got
        message, _, self.unread = self.unread.partition(b"\0")
        return json.loads(message)

    def close(self):
        with suppress(BrokenPipeError, AssertionError):
            self.call("Browser.close")
        self.process.wait(timeout=PATIENCE_SECONDS)
        os.close(self.into)
        os.close(self.answers)

    @contextmanager
    def open(self, page, *, width=1280, height=900, phone=False, dark=False):
        """Open a page and yield its tab; fail at the end if it has written errors or warnings to the console.

        Args:
            page: the file, or an address of this machine.
            width: of the window, in CSS pixels.
            height: of the window, in CSS pixels.
            phone: whether the page sees a touch screen and a mobile browser, which heeds its viewport.
            dark: whether dark colours are preferred.
        """
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        tab = Tab(self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            tab.call(f"{domain}.enable")
        tab.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        tab.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.call("Emulation.setEmulatedMedia", features=[scheme])
        tab.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        self.wait_for("Page.loadEventFired", tab.session)
        tab.evaluate(ALL_DRAWN)
        yield tab
        tab.evaluate("new Promise((done) => setTimeout(done))")
        assert list(tab.complaints()) == []
        self.call("Target.closeTarget", targetId=target)


class Tab:
    """A page in a browser."""

    def __init__(self, browser, session):
        self.browser, self.session = browser, session

    def call(self, method, **params):
        return self.browser.call(method, self.session, **params)

    def evaluate(self, expression):
        """Return the value of a JavaScript expression, or of the promise it returns."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, selector):
        """Click into the middle of an element with the mouse."""
        x, y = self.evaluate(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
            " one.scrollIntoView({block: 'center', inline: 'center'}); const box = one.getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text):
        """Type text into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key, code, text=""):
        """Press and release a key, such as ``press("Tab", 9)``."""
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                **({"text": text} if text and kind == "keyDown" else {}),
            )  # fmt: skip

    def complaints(self):
        """Yield errors and warnings of the page's console."""
        for event in self.browser.events:
            if event.get("sessionId") != self.session:
                continue
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                yield params["exceptionDetails"]["text"]
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in {"error", "warning"}:
                yield " ".join(str(one.get("value")) for one in params["args"])
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in {"error", "warning"}:
                yield params["entry"]["text"]

    def picture(self, path, *, height=None):
        """Write a PNG of the window, or of the page's first ``height`` pixels."""
        clip = {}
        if height is not None:
            width = self.evaluate("innerWidth")
            clip = {
                "clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1},
                "captureBeyondViewport": True,
            }
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **clip)["data"]))
