"""What the pages show of the code is taken from the code while the site is built, by markers on lines of their own:

    {{ source transformer_jax/attention.py attention_weights }}    a function, class, method (Class.method) or constant
    {{ output docs/numpy_blocks.py show_attention }}               the lines of a function, and what it prints
    {{ drawing docs/draw.py masks }}                               the picture (SVG or HTML) that a function returns

Paths are those of the repository. A marker that names what is not there stops the build.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).resolve().parents[1]
MARKER = re.compile(r"^\{\{.*$", re.MULTILINE)
WELL_FORMED = re.compile(r"\{\{ (\w+) (\S+) (\S+) \}\}\s*")
FENCE = "````"  # of four, as a docstring may hold one of three


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page."""
    return expand(markdown)


def expand(markdown: str, root: Path = ROOT) -> str:
    """The page with each marker replaced by what it names."""

    def replace(match: re.Match[str]) -> str:
        found = WELL_FORMED.fullmatch(match[0])
        if found is None or found[1] not in KINDS:
            raise PluginError(f"{match[0]!r} is no marker: write {{{{ KIND FILE NAME }}}}, of {', '.join(KINDS)}.")
        if not (root / found[2]).is_file():
            raise PluginError(f"{match[0]!r} names a file that is not there.")
        return KINDS[found[1]](root, found[2], found[3])

    return MARKER.sub(replace, markdown)


def find(root: Path, file: str, name: str) -> tuple[str, ast.stmt, int]:
    """The source text of what is called `name` in a file (a constant with the text that describes it), its node, and
    the number of its first line."""
    text = (root / file).read_text(encoding="utf-8")
    inside: list[ast.stmt] = ast.parse(text).body
    node, last = ast.stmt(), 0
    for part in name.split("."):
        places = [n for n, statement in enumerate(inside) if part in names_of(statement)]
        if not places:
            raise PluginError(f"{file} defines no {name}, which a page shows: correct the marker, or the code.")
        node, following = inside[places[0]], inside[places[0] + 1 : places[0] + 2]
        is_described = not hasattr(node, "body") and following and _is_docstring(following[0])
        last = (following[0] if is_described else node).end_lineno or 0
        inside = getattr(node, "body", [])
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : last])), node, first


def names_of(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def source(root: Path, file: str, name: str) -> str:
    code, _, first = find(root, file, name)
    return f'{FENCE}python title="{file}" linenums="{first}"\n{code}\n{FENCE}'


def output(root: Path, file: str, name: str) -> str:
    """The body of a function without parameters, and what it prints, numbers rounded to four digits."""
    import numpy

    code, node, first = find(root, file, name)
    body = [part for part in getattr(node, "body", []) if not _is_docstring(part)]
    lines = textwrap.dedent("\n".join(code.splitlines()[body[0].lineno - first :]))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), numpy.printoptions(precision=4, suppress=True):
        getattr(load(root / file), name)()
    return f'{FENCE}python title="{file}"\n{lines}\n{FENCE}\n\n{FENCE}text\n{printed.getvalue().rstrip()}\n{FENCE}'


def _is_docstring(part: ast.stmt) -> bool:
    return isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)


def drawing(root: Path, file: str, name: str) -> str:
    find(root, file, name)
    picture = getattr(load(root / file), name)()
    # A blank line would end the HTML in Markdown's eyes.
    return "\n".join(line for line in picture.splitlines() if line.strip())


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


KINDS: Mapping[str, Callable[[Path, str, str], str]] = {"source": source, "output": output, "drawing": drawing}
