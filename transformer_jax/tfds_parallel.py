"""Parallel text in tensorflow-datasets, without TensorFlow: reading a set by its name, making one from text files.

Only sets in array_record format are read: it has random access without TensorFlow, and its writer keeps every row.
tensorflow-datasets is an optional dependency, `pip install transformer-jax[tfds]`.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_jax.corpus import ParallelText
from transformer_jax.errors import AbsentError, UserError
from transformer_jax.pair_sources import Pair, PairSource, open_files
from transformer_jax.sharding import is_main_process, wait_for_main

FORMAT = "array_record"
READ_AT_ONCE = 1024
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def _import_tfds() -> Any:
    try:
        return importlib.import_module("tensorflow_datasets")
    except ImportError as error:
        raise AbsentError(
            f"tensorflow-datasets cannot be imported ({error}); install it with pip install 'transformer-jax[tfds]'."
        ) from error


# --- reading ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dataset:
    """A prepared set with text in two languages."""

    builder: Any
    languages: tuple[str, str]

    def split(self, name: str) -> PairSource:
        """The pairs of a split, or of a part of one such as `train[:10%]`, in the order of the set's files."""
        splits = self.builder.info.splits
        if name == "val" and "val" not in splits and "validation" in splits:
            name = "validation"  # our own default's name; most sets have the longer one
        try:
            n_pairs = splits[name].num_examples
            files = splits[name].filepaths if n_pairs else []
        except (KeyError, ValueError) as error:
            raise UserError(
                f"{self.builder.info.full_name} has no split {name!r}; it has {', '.join(splits)}: name one of them "
                "(--data.train-split, --data.validation-split, --data.test-split)."
            ) from error
        if not n_pairs:
            raise UserError(f"The split {name!r} of {self.builder.info.full_name} is empty; name another part of it.")
        digest = hashlib.sha256(f"{name} {n_pairs} {' '.join(self.languages)}".encode())
        for path in map(Path, files):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return DatasetPairs(self.builder, name, self.languages, n_pairs, digest.hexdigest())

    def text(self, split: str) -> ParallelText:
        """All of a split but the pairs with a blank side."""
        kept = [(source, target) for source, target in self.split(split) if source.strip() and target.strip()]
        return ParallelText([source for source, _ in kept], [target for _, target in kept])


@dataclass(frozen=True)
class DatasetPairs:
    """The pairs of a split, read from the set's files a thousand at a time."""

    builder: Any
    split: str
    languages: tuple[str, str]
    n_pairs: int
    digest: str

    @property
    def name(self) -> str:
        return f"{self.builder.info.full_name} {self.split}"

    def __len__(self) -> int:
        return self.n_pairs

    def __iter__(self) -> Iterator[Pair]:
        tfds = _import_tfds()
        parse = importlib.import_module("tensorflow_datasets.proto").tf_example_pb2.Example.FromString
        # The library's own decoder goes through its features one by one, at a quarter of this speed.
        raw = tfds.decode.DeserializeMethod.RAW_BYTES
        records = self.builder.as_data_source(self.split, deserialize_method=raw)
        for first in range(0, self.n_pairs, READ_AT_ONCE):
            for record in records.__getitems__(range(first, min(first + READ_AT_ONCE, self.n_pairs))):
                features = parse(record).features.feature
                source, target = (features[language].bytes_list.value[0] for language in self.languages)
                yield source.decode("utf-8", "replace"), target.decode("utf-8", "replace")


def open_dataset(name: str, folder: Path | None, languages: tuple[str, str], download: bool = True) -> Dataset:
    """Finds a set by its name, NAME[/CONFIG][:VERSION]; one that has to be downloaded first is, by the main process.

    Args:
        folder: where sets are; None: tensorflow-datasets' default.
        languages: the names of the source's and the target's text in it, such as "en" and "de".
        download: False refuses a set that is not there yet.
    """
    if languages[0] == languages[1]:
        raise UserError(
            f"Source and target are both {languages[0]}; name two languages (--data.source-lang, --data.target-lang)."
        )
    tfds = _import_tfds()
    # Those of the library that are not prepared yet are known to it only after this, where TensorFlow is absent.
    importlib.import_module("tensorflow_datasets.translate")
    builder = _find(tfds, name, folder)
    if not builder.is_prepared():
        if not download:
            raise AbsentError(f"{name} is not in {folder or 'the default folder of tensorflow-datasets'} yet.")
        if is_main_process():
            _download(builder, name)
        wait_for_main(Path(builder.data_path).is_dir, "download of the data set")
        builder = _find(tfds, name, folder)  # what it holds is known only now
    found = str(getattr(builder.info.file_format, "value", builder.info.file_format))
    if found != FORMAT:
        raise UserError(f"{builder.data_path} is prepared as {found}, which needs TensorFlow: prepare it as {FORMAT}.")
    features = builder.info.features
    texts = [key for key in features.keys() if isinstance(features[key], tfds.features.Text)]  # noqa: SIM118, no dict
    for language in languages:
        if language not in texts:
            raise UserError(
                f"{name} has no text called {language}; it has {', '.join(texts) or 'none'}: name two of them with "
                "--data.source-lang and --data.target-lang."
            )
    return Dataset(builder, languages)


def _find(tfds: Any, name: str, folder: Path | None) -> Any:
    place = folder or "its default folder"
    try:
        return tfds.builder(name, data_dir=folder and str(folder), file_format=FORMAT)
    except tfds.core.DatasetNotFoundError as error:
        raise UserError(
            f"There is no set {name} in {place}, and tensorflow-datasets knows none of that name: check --data.tfds "
            "and --data.tfds-dir."
        ) from error
    except (ValueError, AssertionError) as error:
        raise UserError(f"tensorflow-datasets cannot open {name} in {place}: {_first_line(error)}") from error


def _download(builder: Any, name: str) -> None:
    try:
        builder.download_and_prepare()
    except Exception as error:  # whatever a server, a disk or the set's own program may raise
        raise UserError(
            f"tensorflow-datasets cannot download and prepare {name} ({type(error).__name__}: {_first_line(error)}); "
            f"prepare it elsewhere as {FORMAT} and name its folder with --data.tfds-dir."
        ) from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


# --- making -------------------------------------------------------------------------------------------------


def parallel_text_builder(set_name: str) -> Any:
    """The class `ParallelText`, a builder of tensorflow-datasets. It is made here since its base is imported here."""
    tfds = _import_tfds()

    class ParallelText(tfds.core.GeneratorBasedBuilder):
        """Sentence pairs from text files: each example has one text for each language, in the order of the lines."""

        name = set_name
        VERSION = tfds.core.Version("1.0.0")

        def __init__(self, splits: Mapping[str, PairSource], languages: tuple[str, str], **options: Any) -> None:
            self.text_splits, self.languages = splits, languages
            super().__init__(**options)

        def _info(self) -> Any:
            return tfds.core.DatasetInfo(
                builder=self,
                description="Parallel text made from text files, one sentence a line.",
                features=tfds.features.Translation(self.languages),
                supervised_keys=self.languages,
                disable_shuffling=True,  # the set trains what the files train: in the same order
            )

        def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
            return {split: self._generate_examples(pairs) for split, pairs in self.text_splits.items()}

        def _generate_examples(self, pairs: PairSource) -> Iterator[tuple[int, dict[str, str]]]:
            for index, pair in enumerate(pairs):
                yield index, dict(zip(self.languages, pair, strict=True))

    return ParallelText


def prepare_parallel_text(
    splits: Mapping[str, tuple[Path, Path]], languages: tuple[str, str], folder: Path, name: str = "parallel_text"
) -> Path:
    """Makes a prepared set, FOLDER/NAME/SOURCE-TARGET/1.0.0, from a source and a target file for each split.

    Lines are read by the rules of `corpus`: blank pairs are kept, in their place, and bytes that are not UTF-8 become
    U+FFFD. A set that is there already is left as it is.

    Returns:
        The folder of the set.
    """
    tfds = _import_tfds()
    for part in (name, *languages):
        if not _NAME.fullmatch(part):
            raise UserError(f"{part!r} cannot name a set or a language in it: take a letter a-z, then a-z, 0-9 and _.")
    if languages[0] == languages[1]:
        raise UserError(f"Both languages are called {languages[0]}; each side needs a name of its own.")
    sources = {split: open_files(*paths) for split, paths in splits.items()}
    if not sources:
        raise UserError("No split is named: name at least one, with its source file and its target file.")
    with tfds.core.registered.skip_registration():  # of no use to others, and a second one of a name is refused
        builder_class = parallel_text_builder(name)
    builder = builder_class(
        sources,
        languages,
        config=tfds.core.BuilderConfig(name="-".join(languages)),
        data_dir=str(folder),
        file_format=FORMAT,
    )
    if builder.is_prepared():
        raise UserError(f"{builder.data_path} is a prepared set already: delete it, or take another folder or name.")
    builder.download_and_prepare()
    return Path(builder.data_path)
