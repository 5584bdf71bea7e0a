"""Looks at pages in headless Chromium, over its DevTools protocol: JSON on two pipes, a zero byte behind each."""

import base64
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_SECONDS = 60  # that Chromium may take to answer, or a page to load
_WINDOWS = {"wide, light": (1280, 900, "light"), "narrow, dark": (390, 844, "dark")}
_SCHEMES = {"light": "default", "dark": "slate"}  # as mkdocs-material calls them
# Pictures that are not shown, and by how much the page is wider than the window.
_LOOK = """(async () => {
  await Promise.all([...document.images].map(image => image.decode().catch(() => 0)));
  return {
    missing: [...document.images].filter(image => !image.naturalWidth).map(image => image.src),
    excess: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    scheme: document.body.dataset.mdColorScheme,
  };
})()"""


def find_browser() -> str | None:
    """Chromium's or Chrome's program, where one is installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def look_at_pages(browser: str, site: Path, names: list[str]) -> list[str]:
    """Shows each page of the folder `site` in a wide and in a narrow window; returns what is wrong with them."""
    wrong = []
    with Chromium(browser) as chromium:
        for window, (width, height, scheme) in _WINDOWS.items():
            chromium.resize(width, height, scheme)
            with served(site) as address:  # a new one for each window: pages remember their theme by the address
                for name in names:
                    wrong += [f"{name}, {window}: {fault}" for fault in chromium.look(f"{address}/{name}", address)]
    return wrong


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serves a folder on this machine alone; gives the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


class Chromium:
    """One headless browser with one tab. Nothing that it does reaches beyond this machine."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The protocol is on descriptors 3 and 4.
        moved = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-extensions",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            f"--user-data-dir={self._folder.name}",
            "--remote-debugging-pipe",
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", moved, program, *options],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._events: list[dict[str, Any]] = []
        self._session: str | None = None
        self._scheme = "light"
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._folder.name, ignore_errors=True)

    def resize(self, width: int, height: int, scheme: str) -> None:
        """Sets the window's size, and whether the reader prefers "light" or "dark"."""
        self._scheme = scheme
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def look(self, url: str, home: str) -> list[str]:
        """Loads a page; returns what is wrong with it. `home`: the only address that it may ask."""
        self._events.clear()
        error = self._call("Page.navigate", url=url).get("errorText")
        if error:
            return [error]
        self._wait(lambda: any(event["method"] == "Page.loadEventFired" for event in self._events))
        seen = self._call("Runtime.evaluate", expression=_LOOK, awaitPromise=True, returnByValue=True)["result"][
            "value"
        ]
        wrong = [f"{picture} is not shown" for picture in seen["missing"]]
        if seen.get("scheme", _SCHEMES[self._scheme]) != _SCHEMES[self._scheme]:
            wrong.append(f"the reader prefers {self._scheme}, and the page is of the scheme {seen['scheme']}")
        if seen["excess"] > 0:
            wrong.append(f"the page is {seen['excess']} pixels wider than its window")
        return wrong + [fault for event in self._events for fault in _faults(event["method"], event["params"], home)]

    def screenshot(self, path: Path) -> None:
        """Writes what the window shows as a PNG."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer: dict[str, Any] = {}
        self._wait(lambda: bool(answer), number, answer)
        if "error" in answer:
            raise RuntimeError(f"Chromium refused {method}: {answer['error']['message']}")
        return answer["result"]

    def _wait(self, done: Callable[[], bool], number: int = 0, answer: dict[str, Any] | None = None) -> None:
        """Reads messages until `done`; puts the answer to message `number` into `answer`."""
        end = time.monotonic() + _SECONDS
        while not done():
            ready, _, _ = select.select([self._in], [], [], max(0, end - time.monotonic()))
            chunk = os.read(self._in, 1 << 16) if ready else b""
            if not chunk:
                raise RuntimeError("Chromium has ended" if ready else f"Chromium did not answer in {_SECONDS} seconds")
            *messages, self._buffer = (self._buffer + chunk).split(b"\0")
            for message in map(json.loads, messages):
                if answer is not None and message.get("id") == number:
                    answer.update(message)
                elif "method" in message:
                    self._events.append(message)


def _faults(method: str, params: dict[str, Any], home: str) -> Iterator[str]:
    """What an event of the browser says is wrong."""
    if method == "Runtime.exceptionThrown":
        details = params["exceptionDetails"]
        yield f"an exception: {details.get('exception', {}).get('description', details['text'])}"
    elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
        yield "the console says " + " ".join(str(word.get("value", word.get("description"))) for word in params["args"])
    elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
        yield f"the console says {params['entry']['text']} {params['entry'].get('url', '')}"
    elif method == "Network.requestWillBeSent":
        url = params["request"]["url"]
        if not url.startswith((f"{home}/", "data:", "blob:")):
            yield f"{url} is asked for"
