"""What every test runs under: a CPU with 8 devices, programs compiled quickly and once, annotations checked.

All of it must stand before jax is initialised and before the package is imported.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from browser import Browser

N_DEVICES = 8
ROOT = Path(__file__).resolve().parents[1]

# The environment is inherited by subprocesses that tests start. The number of devices is not put there: each
# subprocess chooses its own.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs that run for milliseconds: what the compiler would gain is lost many times over in compiling, of which the
# flags leave a third. A version that does not know a flag ends the process, so they are for those that do.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
QUICK = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = QUICK if version("jaxlib").startswith("0.10.") else ""
# Models here are much alike: their programs are kept on disk for as long as the tests run, and shared among all
# processes of the run, so that each is compiled once.
if "PYTEST_XDIST_WORKER" not in os.environ:
    PROGRAMS = tempfile.TemporaryDirectory(prefix="programs-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = PROGRAMS.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
from flax import struct  # noqa: E402

jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
jax.config.update("jax_num_cpu_devices", N_DEVICES)


def _check_annotations() -> None:
    """Annotations of the package's functions are checked at every call, shapes included."""
    from jaxtyping import install_import_hook

    flax_dataclass = struct.dataclass

    def dataclass(*args: Any, **options: Any) -> Any:
        # JAX rebuilds a pytree with shapes, shardings or strings in the place of its arrays: such a class is
        # checked where functions take and return it, not where it is made.
        made = flax_dataclass(*args, **options)
        made.__no_type_check__ = True
        return made

    struct.dataclass = dataclass
    # The configs check their values themselves, in words that the tests want to read.
    names = sorted(path.stem for path in (ROOT / "transformer_jax").glob("*.py"))
    checked = [
        f"transformer_jax.{name}" for name in names if name not in ("__init__", "__main__", "config", "data_config")
    ]
    # The numeric tower: where a float is asked for an int will do, as everywhere in Python's type system.
    install_import_hook(checked, "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")


ANNOTATIONS_CHECKED = find_spec("jaxtyping") is not None and find_spec("beartype") is not None
if ANNOTATIONS_CHECKED:
    assert "transformer_jax" not in sys.modules, "imported before the hook: its annotations would go unchecked"
    _check_annotations()


def pytest_report_header() -> str:
    return f"jax {jax.__version__}, annotations {'checked' if ANNOTATIONS_CHECKED else 'NOT checked'}"


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Data beside the checkout: real corpora and models that the repository does not hold."""
    path = ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip(f"{path} is not there: this test needs its data")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium for pages; see browser.py."""
    from browser import open_browser

    with open_browser() as started:
        yield started
