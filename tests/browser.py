"""A headless Chromium for tests of the pages that this project makes.

A test asks for the `browser` fixture (conftest.py), one browser for each test module; it skips where selenium, Chromium
or its driver is missing. A page should open from its file, work, and be quiet: no errors, nothing asked of a network.

    def test_the_page_shows_the_number(browser: Browser, tmp_path: Path) -> None:
        browser.open(tmp_path / "page.html")
        browser.hover(browser.find("#token-3"))
        assert browser.text("#weight") == "0.81"
        browser.assert_quiet()
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

DESKTOP, PHONE = (1280, 900), (390, 844)
"""Window sizes, in CSS pixels."""
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DRIVER = ("chromedriver", "chromium.chromedriver")
SWITCHES = (
    "--headless=new",
    "--no-sandbox",  # which a container's root cannot have
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
_NO_REQUEST = ("file:", "data:", "blob:", "about:", "chrome:")


class Browser:
    """What tests do with a page. `driver` is selenium's own object, for all else."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    # --- opening a page -------------------------------------------------------------------------------------

    def open(self, path: Path) -> None:
        """Opens a file of this machine. What earlier pages logged is forgotten."""
        self.console()
        self.requests()
        self.driver.get(path.resolve().as_uri())

    def resize(self, width: int, height: int, *, phone: bool | None = None) -> None:
        """The size of the view, in CSS pixels. A phone has a touch screen, and heeds the page's viewport tag."""
        phone = width < 600 if phone is None else phone
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": phone})
        self._wait_for_frames()

    def prefer(self, scheme: Literal["light", "dark"]) -> None:
        """What the page's `prefers-color-scheme` sees."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        self._wait_for_frames()

    def _wait_for_frames(self) -> None:
        """Until the page has heard of a change and drawn: it hears just before a frame, which it fills; the next is
        after that."""
        script = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))"
        self.driver.execute_async_script(script)

    # --- looking --------------------------------------------------------------------------------------------

    def find(self, selector: str) -> Any:
        """The first element of a CSS selector; an error of selenium's where there is none."""
        return self.driver.find_element("css selector", selector)

    def find_all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def text(self, selector: str) -> str:
        """What an element says, hidden or not."""
        return self.find(selector).get_property("textContent").strip()

    def run(self, script: str, *arguments: Any) -> Any:
        """What JavaScript returns: `run("return document.title")`."""
        return self.driver.execute_script(script, *arguments)

    def colour(self, selector: str, name: str = "background-color") -> str:
        """A computed colour, as `rgba(...)`."""
        return self.find(selector).value_of_css_property(name)

    def overflow(self) -> int:
        """By how many pixels the page is wider than its window."""
        return self.run("const e = document.documentElement; return e.scrollWidth - e.clientWidth")

    def screenshot(self, path: Path, *, whole_page: bool = False) -> None:
        """A PNG of the window, or of all that could be scrolled to."""
        asked = {"format": "png", "captureBeyondViewport": whole_page}
        if whole_page:
            e = "document.documentElement"
            width, height = self.run(f"return [{e}.clientWidth, {e}.scrollHeight]")
            asked["clip"] = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", asked)
        path.write_bytes(base64.b64decode(shot["data"]))

    # --- doing ----------------------------------------------------------------------------------------------

    def hover(self, element: Any) -> None:
        """Moves the mouse onto the middle of an element, scrolled into view."""
        from selenium.webdriver import ActionChains

        self.run("arguments[0].scrollIntoView({block: 'center', inline: 'center'})", element)
        ActionChains(self.driver, duration=0).move_to_element(element).perform()

    def press(self, *keys: str) -> None:
        """Keys for the element that has the focus: characters, or names of selenium's `Keys` such as TAB."""
        from selenium.webdriver import ActionChains, Keys

        ActionChains(self.driver, duration=0).send_keys(*(getattr(Keys, key, key) for key in keys)).perform()

    def choose(self, selector: str, value: str) -> None:
        """Sets a slider, a field or a list (by the option's value) as a user would: the page hears of it."""
        script = """
            const [element, value] = arguments;
            element.value = value;
            for (const name of ['input', 'change']) element.dispatchEvent(new Event(name, {bubbles: true}));
            return element.value;
        """
        assert self.run(script, self.find(selector), value) == value, f"{selector} does not take {value!r}"

    # --- being quiet ----------------------------------------------------------------------------------------

    def console(self) -> list[str]:
        """Errors and warnings since the last call: of scripts, of missing files, of the browser."""
        levels = ("WARNING", "SEVERE")
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in levels]

    def requests(self) -> list[str]:
        """Addresses outside this machine that were asked for since the last call."""
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
            elif message["method"] == "Network.webSocketCreated":
                found.append(message["params"]["url"])
        return [url for url in found if not url.startswith(_NO_REQUEST)]

    def assert_quiet(self) -> None:
        """No error since the page was opened, and nothing asked of a network."""
        assert self.console() == []
        assert self.requests() == []


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser with a profile of its own, light, of desktop size; the test skips where there is none."""
    pytest.importorskip("selenium", reason="selenium is not installed: pages are not tested")
    chromium, driver = (next(filter(None, map(shutil.which, names)), None) for names in (CHROMIUM, DRIVER))
    if chromium is None or driver is None:
        pytest.skip(f"{'Chromium' if chromium is None else 'chromedriver'} is not installed: pages are not tested")
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        started = _start(chromium, driver, Path(profile))
        try:
            browser = Browser(started)
            browser.resize(*DESKTOP)
            browser.prefer("light")
            yield browser
        finally:
            started.quit()


def _start(chromium: str, driver: str, folder: Path, attempts: int = 2) -> Any:
    """Selenium's driver. On a machine that is busy the first start may take longer than it waits; the files are read
    then, and the second is faster."""
    from selenium import webdriver
    from selenium.common.exceptions import SessionNotCreatedException
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    for switch in (*SWITCHES, f"--user-data-dir={folder / str(attempts)}"):
        options.add_argument(switch)
    try:
        return webdriver.Chrome(options, Service(driver))
    except SessionNotCreatedException:
        if attempts == 1:
            raise
        return _start(chromium, driver, folder, attempts - 1)
