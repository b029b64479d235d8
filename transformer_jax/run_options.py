"""A run's config from a file in configs/ and options of the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.util
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from transformer_jax.config import RunConfig, replace
from transformer_jax.errors import UserError

Accelerator = Literal["P100", "V100", "A100", "H100", "H200", "TPUv4", "TPUv5e", "TPUv5p"]


@dataclass(frozen=True)
class ProcessOptions:
    """Several processes (hosts) that train as one."""

    coordinator: str | None = None
    """host:port of process 0."""
    count: int | None = None
    """How many there are; 0: ask the cluster (SLURM, Open MPI, TPU pod) for everything."""
    id: int | None = None
    """This one's number, from 0."""


@dataclass(frozen=True)
class TrainOptions:
    """Train a Transformer. The config file makes the run; every setting of it can be changed here."""

    config: Path
    """Python file that defines `config`, a RunConfig."""
    output: Path | None = None
    """Run folder; runs/NAME if left out."""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on where the run folder's last checkpoint ends. never: refuse to."""
    smoke: bool = False
    """Try the machinery: 500 pairs, 2 epochs, no evaluation, in a folder of its own."""
    dry_run: bool = False
    """Tell what the run takes - parameters, memory, arithmetic, days on `accelerators` - and end; needs no data."""
    accelerator: Accelerator = "H100"
    """Of a dry run."""
    accelerators: int = 8
    """Of a dry run: how many."""
    processes: ProcessOptions = field(default_factory=ProcessOptions)
    run: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)


def load_config(path: Path) -> RunConfig:
    """Runs a config file and returns its `config`."""
    if not path.is_file():
        raise UserError(f"There is no config file {path}.")
    spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file; a config is one that defines `config`.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except Exception as error:  # whatever it is, it is the config file's mistake
        raise UserError(f"The config file {path} cannot be run: {type(error).__name__}, {error}.") from error
    config = getattr(module, "config", None)
    if not isinstance(config, RunConfig):
        raise UserError(f"The config file {path} defines no `config` that is a RunConfig.")
    return config


def parse_options(arguments: Sequence[str], default_config: Path) -> TrainOptions:
    """Reads the command line. The config file is found first, since the other options change what it says."""
    path = _config_path(arguments) or default_config
    run = load_config(path)
    if _names("--train.steps", arguments) and not _names("--train.epochs", arguments):
        run = replace(run, **{"train.epochs": None})
    if _names("--train.steps", arguments) or _names("--train.epochs", arguments):
        run = replace(run, **{"teacher.epochs": None})  # unless it is named too
    options, unknown = _parse(arguments, TrainOptions(config=path, run=run))
    if unknown:
        name = unknown[0].split("=")[0]
        if not name.startswith("--"):
            raise UserError(f"{name!r} belongs to no option; --help lists all.")
        close = difflib.get_close_matches(name.replace("_", "-"), _option_names(options), n=1)
        raise UserError(
            f"There is no option {name}" + (f"; did you mean {close[0]}?" if close else "; --help lists all.")
        )
    if options.accelerators < 1:
        raise UserError(f"--accelerators is {options.accelerators}; it must be at least 1.")
    if options.smoke:
        options = dataclasses.replace(options, run=smoke_run(options.run))
    return options


def smoke_run(run: RunConfig) -> RunConfig:
    """The run cut down to seconds."""
    changes = {"data.limit": 500, "train.epochs": 2, "teacher.epochs": None, "train.evaluate_every": None}
    vocab_size = min(run.data.vocab_size, 500)
    return replace(run, name=f"{run.name}-smoke", **changes, **{"data.vocab_size": vocab_size})


def _names(option: str, arguments: Sequence[str]) -> bool:
    return any(argument.split("=")[0] == option for argument in arguments)


def _config_path(arguments: Sequence[str]) -> Path | None:
    for i, argument in enumerate(arguments):
        if argument == "--config" and i + 1 < len(arguments):
            return Path(arguments[i + 1])
        if argument.startswith("--config="):
            return Path(argument.removeprefix("--config="))
    return None


def _parse(arguments: Sequence[str], default: TrainOptions) -> tuple[TrainOptions, list[str]]:
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                TrainOptions,
                args=list(arguments),
                default=default,
                prog="train.py",
                return_unknown_args=True,
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise UserError(_sentence(complaint.getvalue())) from stop


def _sentence(boxed: str) -> str:
    """tyro's complaint without the frame that it draws around it."""
    words = re.sub(r"[─-╿]|\x1b\[[0-9;]*m", " ", boxed)
    words = " ".join(words.split())
    words = re.sub("^(Parsing error|Value error|Invalid choice|Missing argument) ", "", words)
    words = re.sub("^Error parsing (run[.])?", "", words)
    words = re.split(" For full helptext| Argument helptext", words)[0]
    return words.rstrip(" .") + "; --help lists all options."


def _option_names(config: Any, prefix: str = "--") -> Iterator[str]:
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        name = "" if f.name == "run" else f.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            yield from _option_names(value, f"{prefix}{name}." if name else prefix)
        else:
            yield f"{prefix}{name}"
