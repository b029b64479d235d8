"""What importing the package costs: the paper part needs jax, flax and numpy, and arrows point down the list."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "transformer_jax"
PAPER = ("products", "attention", "layers", "model", "loss")
SUPPORT = {"array_types", "config", "config_checks", "data_config", "errors"}
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem not in ("__init__", "__main__"))

HEAVY = {
    *("torch", "transformers", "tensorflow", "tensorflow_datasets", "grain", "orbax", "tensorstore", "optax", "chex"),
    *("sentencepiece", "tyro", "jaxtyping", "beartype", "matplotlib", "safetensors", "huggingface_hub", "sacrebleu"),
    *("tqdm", "tensorboardX", "array_record"),
}

BLOCK = f"""
import sys
for name in {HEAVY!r}:
    sys.modules[name] = None  # import of it, or of anything in it, now raises ModuleNotFoundError
"""

APPLY = """
import jax, jax.numpy as jnp, numpy as np
from transformer_jax import ModelConfig, Transformer
from transformer_jax.loss import cross_entropy
config = ModelConfig(vocab_size=11, d_model=8, n_heads=2, d_ff=16, n_encoder_layers=1, n_decoder_layers=1)
model, ids = Transformer(config), jnp.array([[4, 5, 2]])
params = model.init(jax.random.key(0), ids, ids)["params"]
logits = model.apply({"params": params}, ids, ids)
assert logits.shape == (1, 3, 11) and np.isfinite(logits).all()
assert np.isfinite(cross_entropy(logits, ids, jnp.ones((1, 3)), smoothing=0.1).loss)
print("applied")
"""


def run_python(code: str) -> str:
    """Standard output of a fresh interpreter that sees the package, on the CPU, without the annotations' checks."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported_by(name: str) -> set[str]:
    """Modules of the package that a module's source imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "transformer_jax":
                found |= {alias.name for alias in node.names}
            elif node.module.startswith("transformer_jax."):
                found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("transformer_jax.")}
    return found


def test_the_block_that_these_tests_rely_on_does_block() -> None:
    code = BLOCK + "try:\n    import optax\nexcept ModuleNotFoundError:\n    print('blocked')"
    assert run_python(code).strip() == "blocked"


def test_the_paper_part_imports_and_runs_with_jax_flax_and_numpy_only() -> None:
    modules = ", ".join(f"transformer_jax.{name}" for name in PAPER)
    assert "applied" in run_python(f"{BLOCK}\nimport transformer_jax, {modules}\n{APPLY}")


@pytest.mark.skipif(not (PACKAGE / "search.py").exists(), reason="the package has no search.py yet")
def test_search_imports_with_jax_flax_and_numpy_only_and_knows_no_model() -> None:
    assert "imported" in run_python(f"{BLOCK}\nimport transformer_jax.search\nprint('imported')")
    assert imported_by("search") <= SUPPORT | {"attention", "best", "search_rules", "sampling"}


def test_no_module_of_the_package_imports_tensorflow() -> None:
    """Neither at import nor by a try: the finder sees every attempt, and from where it comes."""
    modules = "\n".join(f"import transformer_jax.{name}" for name in MODULES)
    code = f"""
import sys, traceback
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tensorflow", "planted"):
            files = [f.filename for f in traceback.extract_stack()]
            importer = next(f for f in reversed(files[:-1]) if "importlib" not in f)
            if importer == "<string>" or "transformer_jax" in importer:
                print("attempt:", name)
sys.meta_path.insert(0, Watch())
try:
    import planted
except ModuleNotFoundError:
    pass
{modules}
print("loaded:", "tensorflow" in sys.modules)
"""
    assert run_python(code).splitlines()[-2:] == ["attempt: planted", "loaded: False"]


def test_a_run_does_not_wait_for_pytorch_to_be_imported() -> None:
    """Its TensorBoard writer would, where PyTorch is installed."""
    code = """
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from transformer_jax.run_folder import RunFolder
with TemporaryDirectory() as folder:
    run = RunFolder(Path(folder))
    run.write("train", 1, loss=2.5)
    run.close()
    print("torch" in sys.modules, "tensorboardX" in sys.modules, len(list(Path(folder).glob("events.*"))))
"""
    assert run_python(code).split() == ["False", "True", "1"]


def test_the_package_imports_a_name_when_it_is_asked_for() -> None:
    listed = "print(sorted(m for m in sys.modules if m.startswith('transformer_jax.')))"
    code = f"import sys, transformer_jax\n{listed}\ntransformer_jax.Transformer\n{listed}"
    first, second = map(ast.literal_eval, run_python(code).splitlines())
    assert first == []
    assert {name.split(".")[1] for name in second} == SUPPORT | {"products", "attention", "layers", "model"}


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    import transformer_jax

    with pytest.raises(AttributeError, match="no attribute 'Transformr'"):
        _ = transformer_jax.Transformr


@pytest.mark.parametrize("name", [*PAPER, "optimizer"])
def test_the_paper_part_imports_nothing_of_the_rest(name: str) -> None:
    assert imported_by(name) <= SUPPORT | {"products", "attention", "layers"}


@pytest.mark.parametrize("name", MODULES)
def test_no_module_imports_the_command_line(name: str) -> None:
    assert "cli" not in imported_by(name)
