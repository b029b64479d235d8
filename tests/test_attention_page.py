"""The page of an explanation, as a reader uses it, in Chromium; and the picture."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import DESKTOP, PHONE, Browser
from made_explanation import made

from transformer_jax.alignment import pharaoh
from transformer_jax.attention_maps import AttentionMaps
from transformer_jax.attention_page import attention_page
from transformer_jax.attention_plots import attention_picture
from transformer_jax.errors import UserError

FOUND = made(["▁A", "▁t", "ul", "ip", "."], ["▁Eine", "▁Tul", "pe", "."])
NASTY = [
    *(
        "</script><b>bold</b>",
        "▁<img src=x onerror=alert(1)>",
        "&amp;",
        '"',
        "'",
        "\\u003c",
        "<!--",
        "{{x}}",
        "/*DATA*/",
    ),
    *("\u2028", "$1^2$", "`${1}`", "🇩🇪", "\ud800", "مرحبا"),
]


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = tmp_path_factory.mktemp("page") / "map.html"
    path.write_text(attention_page(FOUND), encoding="utf-8")
    browser.open(path)
    yield browser
    browser.assert_quiet()


def details(browser: Browser) -> list[tuple[str, float]]:
    """Label and value of each line under the tokens."""
    rows = [row.find_elements("css selector", "span.name, b") for row in browser.find_all("#detail li")]
    return [(name.text, float(value.text)) for name, value in rows]


def expected(weights: np.ndarray, labels: tuple[str, ...]) -> list[tuple[str, float]]:
    order = sorted(range(len(weights)), key=lambda n: -weights[n])[:5]
    return [(labels[n], float(weights[n])) for n in order if weights[n] >= 0.5e-4]


def assert_lists(browser: Browser, weights: np.ndarray, labels: tuple[str, ...]) -> None:
    shown, wanted = details(browser), expected(weights, labels)
    assert [name for name, _ in shown] == [name for name, _ in wanted]
    assert [value for _, value in shown] == pytest.approx([value for _, value in wanted], abs=1.1e-4)


def kind(browser: Browser, name: str) -> None:
    browser.run(f"document.querySelector('[name=kind][value={name}]').click()")


def test_it_opens_with_the_last_layer_and_the_mean_of_the_heads(page: Browser) -> None:
    assert page.text("#source") == FOUND.source
    assert page.text("#target") == FOUND.target
    page.hover(page.find("[data-side=lookers][data-n='2']"))
    assert_lists(page, FOUND.maps.cross_NHTS[-1].mean(axis=0)[2], FOUND.source_tokens)
    probability = round(float(np.exp(FOUND.token_log_probs[2])), 4)
    assert f"written with probability {probability:.3f}" in page.text("#detail")


@pytest.mark.parametrize("name", ["encoder", "decoder", "cross"])
def test_each_attention_layer_and_head_shows_its_weights(name: str, page: Browser) -> None:
    kind(page, name)
    weights, (rows, columns) = FOUND.weights(name), FOUND.labels(name)  # type: ignore[arg-type]
    for layer, head in ((1, 2), (2, 1), (2, 0)):
        page.choose("#layer", str(layer))
        page.choose("#head", str(head))
        map_TS = weights[layer - 1].mean(axis=0) if head == 0 else weights[layer - 1, head - 1]
        cells = page.run(
            "return [...document.querySelectorAll('#matrix td')].map(e => e.style.getPropertyValue('--w'))"
        )
        np.testing.assert_allclose(np.asarray(cells, float).reshape(map_TS.shape), map_TS, atol=1.1e-4)
        page.hover(page.find(f"[data-side=lookers][data-n='{len(rows) - 1}']"))
        assert_lists(page, map_TS[-1], columns)
        page.hover(page.find("[data-side=seen][data-n='1']"))
        assert_lists(page, map_TS[:, 1], rows)
    names = [
        [e.get_property("textContent") for e in page.find_all(f"#tokens .{side} .name")] for side in ("lookers", "seen")
    ]
    assert names == [list(rows), list(columns)]


def test_a_cell_tells_its_weight_and_lights_its_row_and_column(page: Browser) -> None:
    kind(page, "cross")
    page.choose("#layer", "1")
    page.choose("#head", "1")
    page.hover(page.find("#matrix td[data-i='1'][data-j='3']"))
    weight = FOUND.maps.cross_NHTS[0, 0, 1, 3]
    assert page.text("#detail p").startswith(f"“Tul” takes {weight:.4f} from “ip”.")
    assert len(page.find_all("#matrix td.lit")) == 5 + 6 - 1
    assert len(page.find_all("#matrix td.here")) == 1


def test_a_small_map_chooses_its_layer_and_head(page: Browser) -> None:
    kind(page, "encoder")
    buttons = page.find_all("#heads button")
    assert len(buttons) == 2 * (1 + 2)  # layers, and the mean beside the heads
    page.run("arguments[0].click()", page.find("[aria-label='layer 1, head 2']"))
    assert [page.find(f"#{name}").get_property("value") for name in ("layer", "head")] == ["1", "2"]
    assert [b.get_attribute("aria-label") for b in page.find_all("#heads [aria-pressed=true]")] == ["layer 1, head 2"]
    # Its picture: the opacity of each pixel is the weight.
    read = """
        const canvas = document.querySelector("[aria-label='layer 1, head 2'] canvas");
        const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        return [...data].filter((_, n) => n % 4 === 3);
    """
    opacities = np.asarray(page.run(read)).reshape(6, 6) / 255
    np.testing.assert_allclose(opacities, FOUND.maps.encoder_NHSS[0, 1], atol=0.003)


def test_keys_go_from_token_to_token_and_a_click_keeps_one(page: Browser) -> None:
    page.hover(page.find("h1"))
    kind(page, "cross")
    page.run("document.querySelector('[data-side=lookers][tabindex=\"0\"]').focus()")
    page.press("ARROW_DOWN")
    assert "Tul" in page.text("#detail p")
    page.press("ARROW_LEFT", "ARROW_UP")
    assert page.text("#detail p").startswith("“A” is looked at most by")
    page.press("ENTER")
    page.hover(page.find("h1"))
    page.run("document.activeElement.blur()")
    assert page.text("#detail p").startswith("“A” is looked at most by")
    page.press("ESCAPE")
    assert page.find_all("#detail li") == []


def test_words_are_linked_as_the_command_links_them(page: Browser) -> None:
    assert page.find("#words-layer").get_property("value") == "3"
    for layer, head, step in ((3, 0, "writes"), (1, 2, "writes"), (2, 0, "reads")):
        page.choose("#words-layer", str(layer))
        page.choose("#words-head", str(head))
        page.choose("#words-step", step)
        links = FOUND.links(layer, head or None, step)  # type: ignore[arg-type]
        assert page.text("#pharaoh") == pharaoh(links)
        assert len(page.find_all("#words line")) == len(links)


def test_no_token_is_read_as_html(browser: Browser, tmp_path: Path) -> None:
    found = made(NASTY, NASTY[::-1], layers=(1, 1))
    (tmp_path / "nasty.html").write_bytes(attention_page(found).encode("utf-8"))
    browser.open(tmp_path / "nasty.html")
    shown = [e.get_property("textContent") for e in browser.find_all("#tokens .seen .name")]
    assert shown == [label.replace("\ud800", "?") for label in found.source_tokens]
    assert browser.find_all("main b:not(.detail b), main img, header b, header img") == []
    browser.hover(browser.find("[data-side=lookers][data-n='3']"))
    assert details(browser)
    browser.assert_quiet()


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_it_fits_its_window_in_light_and_dark(size: tuple[int, int], browser: Browser, tmp_path: Path) -> None:
    words = ["▁Donaudampfschifffahrtsgesellschaft", *["▁a", "bc", "def", "▁longer", "."] * 6]
    (tmp_path / "long.html").write_text(attention_page(made(words, words, layers=(6, 6), heads=8)), encoding="utf-8")
    browser.resize(*size)
    browser.open(tmp_path / "long.html")
    assert browser.overflow() == 0
    for n in (3, 25):  # what one points at is explained within the window, however long the list is
        browser.hover(browser.find(f"[data-side=lookers][data-n='{n}']"))
        top, bottom, height = browser.run(
            "const box = document.getElementById('detail').getBoundingClientRect();"
            "return [box.top, box.bottom, innerHeight]"
        )
        assert 0 < top < bottom <= height
    light = browser.colour("body")
    browser.prefer("dark")
    assert browser.colour("body") != light
    browser.prefer("light")
    browser.resize(*DESKTOP)
    browser.assert_quiet()


def test_every_control_has_a_name(page: Browser) -> None:
    nameless = """
        return [...document.querySelectorAll('button, select, input')].filter(
            e => !(e.getAttribute('aria-label') || e.tagName === 'BUTTON' && e.textContent.trim() || e.labels?.length)
        ).map(e => e.outerHTML);
    """
    assert page.run(nameless) == []
    assert page.run("return document.documentElement.lang") == "en"
    assert page.find_all("table caption") != []


# --- the picture --------------------------------------------------------------------------------------------


def pixels(png: bytes) -> np.ndarray:
    from matplotlib.image import imread

    return imread(io.BytesIO(png))[..., :3]


def test_the_picture_has_a_panel_for_every_layer_and_head() -> None:
    found = made(["▁A", "▁t", "ul"], ["▁Eine", "▁Tul", "pe"], heads=8)  # wider than the titles
    whole, one_layer, one = (pixels(attention_picture(found, *choice)) for choice in ((), (1,), (1, 1)))
    assert whole.shape[0] > one_layer.shape[0] == one.shape[0]
    assert whole.shape[1] == one_layer.shape[1] > one.shape[1]


def test_the_picture_is_dark_where_the_weight_is() -> None:
    maps = {name: np.zeros_like(weights) for name, weights in vars(FOUND.maps).items()}
    for weights in maps.values():
        weights[..., 0] = 1.0  # everybody looks at the first token
    picture = pixels(attention_picture(dataclasses.replace(FOUND, maps=AttentionMaps(**maps)), 1, 1))
    darkest = (picture.sum(axis=-1) < 0.6) & (picture[..., 2] - picture[..., 0] > 0.15)
    # In each of the three blocks a column of a token's width, from a fifth of an inch at 110 dots on it.
    columns = np.flatnonzero(darkest.sum(axis=0) > 0.1 * len(picture))
    assert 15 < len(columns) < 60
    assert np.ptp(columns) < 60


def test_weights_change_the_picture() -> None:
    other = made(["▁A", "▁t", "ul", "ip", "."], ["▁Eine", "▁Tul", "pe", "."], seed=1)
    assert attention_picture(FOUND, 1) != attention_picture(other, 1)
    assert attention_picture(FOUND, 1) == attention_picture(FOUND, 1)


def test_signs_of_mathematics_and_unknown_scripts_are_drawn_as_text(caplog: pytest.LogCaptureFixture) -> None:
    attention_picture(made(["▁$x^2$", "$", "$\\frac$", "\\"], ["\U00012000"], layers=(1, 1)))
    ours = [record.getMessage() for record in caplog.records if record.name == "transformer_jax"]
    assert [message[:44] for message in ours] == ["No font of this machine has some of the char"]


@pytest.mark.parametrize("token", ["i" * 12, "W" * 12, "日本語日本語", "😀" * 6, "ß\udcff"], ids=ascii)
def test_labels_and_titles_have_room(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No text reaches over the edge, over another text or into a panel."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figures: list[Any] = []
    monkeypatch.setattr(FigureCanvasAgg, "print_png", lambda canvas, *_: figures.append(canvas.figure))
    attention_picture(made([token, "b"], [token, "c"]), 1, 1)
    (figure,) = figures
    texts = [text for text in figure.texts if text.get_text()]
    boxes = [text.get_window_extent() for text in texts] + [axes.get_window_extent() for axes in figure.axes]
    for n, box in enumerate(boxes):
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width
        assert 0 <= box.y0 < box.y1 <= figure.bbox.height
        assert not any(box.overlaps(other) for other in boxes[n + 1 :]), [text.get_text() for text in texts][n:]
    assert len(texts) == 3 * (len(["title", "layer", "head"]) + 3 + 3)


def test_a_picture_too_large_to_look_at_is_refused() -> None:
    many = made(["▁word"] * 120, ["▁Wort"] * 120, layers=(6, 6), heads=8)
    with pytest.raises(UserError, match="too large; choose a --layer"):
        attention_picture(many)
    assert attention_picture(many, 6, 1)


@pytest.mark.parametrize(("layer", "head", "message"), [(3, None, "encoder has no layer 3"), (1, 5, "no head 5")])
def test_a_picture_of_a_layer_or_head_that_is_not_there_is_refused(
    layer: int | None, head: int | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        attention_picture(FOUND, layer, head)
