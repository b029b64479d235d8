"""The harness that pages are tested with: what is wrong with a page is seen."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import DESKTOP, PHONE, Browser

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,"><title>page</title>
<style>body {{ background: white }} @media (prefers-color-scheme: dark) {{ body {{ background: black }} }}</style>
<body><button onmouseenter="this.textContent = 'seen'">button</button>
<input type="range" min="0" max="9" oninput="document.title = this.value"> {body}</body></html>
"""


def page(folder: Path, body: str = "") -> Path:
    path = folder / "page.html"
    path.write_text(PAGE.format(body=body), encoding="utf-8")
    return path


def test_a_page_is_hovered_and_its_slider_moved(browser: Browser, tmp_path: Path) -> None:
    browser.open(page(tmp_path))
    browser.hover(browser.find("button"))
    assert browser.text("button") == "seen"
    browser.choose("input", "7")
    assert browser.run("return document.title") == "7"
    browser.run("document.querySelector('input').focus()")
    browser.press("ARROW_RIGHT")
    assert browser.run("return document.title") == "8"
    browser.assert_quiet()


def test_size_and_colour_scheme_are_those_asked_for(browser: Browser, tmp_path: Path) -> None:
    for size in (PHONE, DESKTOP):
        browser.resize(*size)
        browser.open(page(tmp_path))
        assert browser.run("return [innerWidth, innerHeight]") == list(size)
        assert browser.overflow() == 0
        browser.open(page(tmp_path, '<div style="width: 500px">wide</div>'))
        assert (browser.overflow() > 0) is (size == PHONE)
    browser.prefer("dark")
    assert browser.colour("body") == "rgba(0, 0, 0, 1)"
    browser.prefer("light")
    assert browser.colour("body") == "rgba(255, 255, 255, 1)"


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("<script>nothing.at.all</script>", "nothing is not defined"),
        ("<script>console.warn('careful')</script>", "careful"),
        ('<img src="missing.png">', "missing.png"),
    ],
)
def test_errors_of_a_page_are_seen(body: str, complaint: str, browser: Browser, tmp_path: Path) -> None:
    browser.open(page(tmp_path, body))
    assert complaint in " ".join(browser.console())


def test_requests_to_a_network_are_seen(browser: Browser, tmp_path: Path) -> None:
    browser.open(page(tmp_path, '<img src="http://127.0.0.1:9/pixel.png">'))
    with pytest.raises(AssertionError):
        browser.assert_quiet()
    browser.open(page(tmp_path, '<img src="http://127.0.0.1:9/pixel.png">'))
    assert browser.requests() == ["http://127.0.0.1:9/pixel.png"]
    browser.open(page(tmp_path))
    browser.assert_quiet()
