"""The pages under docs/ as a site: built without a warning, complete, and nothing in it comes from elsewhere."""

from __future__ import annotations

import functools
import http.server
import re
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest
from browser import DESKTOP, PHONE, Browser
from programs import load_program

pytest.importorskip("material", reason="mkdocs-material is not installed: the site is not built")

ROOT = Path(__file__).resolve().parents[1]


def load_hooks() -> ModuleType:
    return load_program(ROOT / "docs" / "hooks.py")


hooks = load_hooks()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as CI builds it; a warning ends that with an error."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
    assert config.strict
    build(config)
    return folder


class Asked(HTMLParser):
    """What a page asks a browser to fetch, and what it links to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.linked: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "a" and values.get("href"):
            self.linked.append(values["href"] or "")
        elif tag == "link" and values.get("rel") not in ("prev", "next"):
            self.fetched.append(values.get("href") or "")
        self.fetched += [values[name] or "" for name in ("src", "srcset", "data", "poster") if name in values]


def pages_of(site: Path) -> list[Path]:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) >= 18
    return pages


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in pages_of(site):
        for address in Asked(page).fetched:
            parts = urlsplit(address)
            assert parts.scheme in ("", "data"), f"{page.name} fetches {address}"
            assert not parts.netloc, f"{page.name} fetches {address}"
            if parts.path and not parts.scheme and page.name != "404.html":
                assert (page.parent / parts.path).is_file(), f"{page.name} fetches {address}, which is not there"
    for sheet in site.rglob("*.css"):
        elsewhere = re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8"))
        assert not elsewhere, sheet.name


def test_links_lead_somewhere(site: Path) -> None:
    for page in pages_of(site):
        if page.name == "404.html":
            continue
        for address in Asked(page).linked:
            parts = urlsplit(address)
            if not parts.scheme and parts.path:
                assert (page.parent / unquote(parts.path)).exists(), f"{page.name} links to {address}"


def test_the_site_holds_no_programs(site: Path) -> None:
    assert not list(site.rglob("*.py"))
    assert (site / "positions.html").read_bytes() == (ROOT / "docs" / "positions.html").read_bytes()


def words_of(page: Path) -> str:
    """What a page says, without its tags."""
    text = re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8"))
    return " ".join(text.replace("&quot;", '"').replace("&#39;", "'").replace("&gt;", ">").split())


def test_pages_show_numpy_golden_value_and_code(site: Path) -> None:
    words = words_of(site / "paper" / "attention.html")
    assert "return weights_TS @ values_SK, weights_TS" in words
    assert "weights [0.75 0.25] output [6. 2.]" in words
    assert "return jax.nn.softmax(jnp.where(mask, scores_BHTS, MASKED_SCORE), axis=-1)" in words
    assert "{{" not in words
    pictures = (site / "paper" / "attention.html").read_text(encoding="utf-8").count("<svg role=")
    assert pictures == 4


# --- markers ------------------------------------------------------------------------------------------------

CODE = '''import math

LIMIT = 3
"""How far."""

@decorated
def first(x):
    """Text."""
    return x

class Second:
    size: int = 1
    """Of it."""

    def method(self):
        return 2

def show():
    """Not shown."""
    value = 1 / 3
    print(round(value, 4))

def picture():
    return "<svg>\\n\\n</svg>"
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "code.py").write_text(CODE.replace("@decorated\n", "@staticmethod\n"), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("marker", "line", "code"),
    [
        ("{{ source code.py first }}", 6, '@staticmethod\ndef first(x):\n    """Text."""\n    return x'),
        ("{{ source code.py Second.method }}", 15, "def method(self):\n    return 2"),
        ("{{ source code.py Second.size }}", 12, 'size: int = 1\n"""Of it."""'),
        ("{{ source code.py LIMIT }}", 3, 'LIMIT = 3\n"""How far."""'),
    ],
)
def test_a_marker_becomes_what_it_names(marker: str, line: int, code: str, root: Path) -> None:
    page = hooks.expand(f"before\n\n{marker}\n\nafter\n", root)
    assert page == f'before\n\n````python title="code.py" linenums="{line}"\n{code}\n````\n\nafter\n'


def test_code_is_shown_as_it_is_now(root: Path) -> None:
    (root / "code.py").write_text("\n\ndef first(): return 'changed'\n", encoding="utf-8")
    assert "linenums=\"3\"\ndef first(): return 'changed'\n" in hooks.expand("{{ source code.py first }}", root)


def test_an_example_is_shown_with_what_it_prints(root: Path) -> None:
    page = hooks.expand("{{ output code.py show }}", root)
    assert page == '````python title="code.py"\nvalue = 1 / 3\nprint(round(value, 4))\n````\n\n````text\n0.3333\n````'


def test_a_drawing_is_html_without_blank_lines(root: Path) -> None:
    assert hooks.expand("{{ drawing code.py picture }}", root) == "<svg>\n</svg>"


@pytest.mark.parametrize(
    "marker",
    [
        "{{ source code.py gone }}",
        "{{ source code.py Second.gone }}",
        "{{ source gone.py first }}",
        "{{ output code.py gone }}",
        "{{ drawing code.py gone }}",
        "{{ sauce code.py first }}",
        "{{ source code.py }}",
        "{{source code.py first}}",
    ],
)
def test_a_marker_that_names_nothing_stops_the_build(marker: str, root: Path) -> None:
    from mkdocs.exceptions import PluginError

    with pytest.raises(PluginError):
        hooks.expand(f"text\n{marker}\n", root)


# --- in a browser -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The site from a server of this machine, as search needs one."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("page", ["index", "paper/attention", "paper/training", "devices", "positions"])
def test_pages_fit_and_are_quiet(browser: Browser, address: str, page: str, size: tuple[int, int]) -> None:
    browser.resize(*size)
    browser.console()
    browser.requests()  # what was before is forgotten
    browser.driver.get(f"{address}/{page}.html")
    assert browser.overflow() == 0
    assert browser.console() == []
    # The browser's own first page may still be loading.
    assert [url for url in browser.requests() if not url.startswith((address, "chrome-untrusted:"))] == []


def test_light_and_dark_follow_the_reader(browser: Browser, address: str) -> None:
    browser.resize(*DESKTOP)
    colours = {}
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        browser.driver.get(f"{address}/paper/attention.html")
        colours[scheme] = browser.colour("body"), browser.colour(".drawing .on", "fill")
    browser.prefer("light")
    assert colours["light"][0] != colours["dark"][0]
    assert colours["light"][1] != colours["dark"][1], "drawings keep the other scheme's colours"
