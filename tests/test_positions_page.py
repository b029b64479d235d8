"""docs/positions.html in a browser: the package's table, and what a reader does with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import DESKTOP, PHONE, Browser

from transformer_jax.layers import sinusoids

MINUS = "\N{MINUS SIGN}"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "positions.html"


@pytest.fixture
def page(browser: Browser) -> Browser:
    browser.resize(*DESKTOP)
    browser.prefer("light")
    browser.open(PAGE)
    return browser


@pytest.mark.parametrize("layout", ["interleaved", "sin_then_cos", "marian"])
@pytest.mark.parametrize(("d_model", "length"), [(8, 512), (30, 100), (512, 40)])
def test_the_table_is_the_packages(page: Browser, d_model: int, layout: Any, length: int) -> None:
    table = page.run("return positions.table(...arguments)", d_model, layout, length)
    np.testing.assert_allclose(table, sinusoids(length, d_model, layout), atol=1e-6)


def test_similarity_is_the_cosine_and_depends_on_the_distance_alone(page: Browser) -> None:
    rows = sinusoids(60, 64, "marian").astype(np.float64)
    cosines = rows @ rows[20] / np.linalg.norm(rows, axis=1) / np.linalg.norm(rows[20])
    found = page.run("return positions.similarities(positions.table(64, 'marian', 60), 20)")
    np.testing.assert_allclose(found, cosines, atol=1e-6)
    np.testing.assert_allclose(found[21:41], found[19::-1], atol=1e-9)


def test_sliders_choose_and_pointing_reads(page: Browser) -> None:
    page.choose("#width", "128")
    page.choose("#length", "50")
    page.choose("#layout", "sin_then_cos")
    page.choose("#position", "7")
    assert [page.text(f"#{name}-value") for name in ("width", "length", "position")] == ["128", "50", "7"]
    page.hover(page.find("#table"))
    position, channel, value = (
        page.text("#reading").replace(MINUS, "-").replace(",", "").replace(":", "").split()[n] for n in (1, 3, 4)
    )
    expected = sinusoids(50, 128, "sin_then_cos")[int(position), int(channel)]
    assert float(value) == pytest.approx(expected, abs=6e-5)
    assert 20 <= int(position) <= 30
    assert 55 <= int(channel) <= 75, "the middle of the picture is the middle of the table"
    page.hover(page.find("#similarity"))
    _, chosen, _, other, value = page.text("#similarity-reading").replace(MINUS, "-").replace(":", "").split()
    rows = sinusoids(50, 128, "sin_then_cos")
    assert chosen == "7"
    assert float(value) == pytest.approx(float(rows[7] @ rows[int(other)] / 64), abs=6e-5)
    page.assert_quiet()


def test_a_click_and_the_arrow_keys_choose_the_position(page: Browser) -> None:
    page.find("#table").click()
    chosen = int(page.text("#position-value"))
    assert chosen in (47, 48, 49, 50, 51)
    page.run("document.getElementById('table').focus()")
    page.press("ARROW_DOWN")
    assert int(page.text("#position-value")) == chosen + 1
    page.press("ARROW_UP", "ARROW_UP")
    assert int(page.text("#position-value")) == chosen - 1
    page.assert_quiet()


def test_a_shorter_table_keeps_the_position_within_it(page: Browser) -> None:
    page.choose("#position", "90")
    page.choose("#length", "8")
    assert page.text("#position-value") == "7"
    page.assert_quiet()


def test_every_setting_draws_without_an_error(page: Browser) -> None:
    for layout in ("interleaved", "sin_then_cos", "marian"):
        for width, length in (("8", "8"), ("8", "512"), ("512", "8"), ("512", "512")):
            page.choose("#layout", layout)
            page.choose("#width", width)
            page.choose("#length", length)
    page.assert_quiet()


def picture(page: Browser, name: str) -> str:
    return page.run("return document.getElementById(arguments[0]).toDataURL()", name)


def test_light_and_dark_phone_and_desktop(page: Browser) -> None:
    light = {name: picture(page, name) for name in ("table", "hands", "similarity")}
    page.prefer("dark")
    assert page.colour("body") != "rgba(251, 250, 248, 1)"
    for name, before in light.items():
        assert picture(page, name) != before, f"{name} is drawn in the colours of the other scheme"
    page.resize(*PHONE)
    page.open(PAGE)
    assert page.overflow() == 0
    page.assert_quiet()


def test_every_control_has_a_name(page: Browser) -> None:
    names = [element.accessible_name for element in page.find_all("input, select, canvas")]
    assert len(names) == 7
    assert all(names), names
