"""Files of Python outside the package, loaded as modules: benchmarks, scripts of the docs, train.py; and processes."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType


def load_program(path: Path) -> ModuleType:
    assert path.is_file(), f"there is no program {path}"
    spec = importlib.util.spec_from_file_location(f"program_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def in_processes(commands: list[list[str]], **variables: str) -> list[str]:
    """Runs the commands side by side; returns what each wrote to standard output."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    workers = [
        subprocess.Popen([sys.executable, *command], env=os.environ | variables, **pipes) for command in commands
    ]
    outputs = []
    for worker in workers:
        out, err = worker.communicate(timeout=240)
        assert worker.returncode == 0, err[-3000:]
        outputs.append(out)
    return outputs


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"
