"""Small files: read with an error that names them, written so that they are never seen half-written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformer_jax.errors import UserError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}): copy or download it again.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not an object: it is not a file of this format.")
    return content


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file so that it is never seen half-written."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    part.replace(path)
