"""benchmarks/captions.py writes captions as the training text is written."""

from pathlib import Path
from types import ModuleType

import pytest
from programs import load_program

ROOT = Path(__file__).parent.parent
TRAINING = ["Der Hund sieht eine junge Frau.", "Die Frau und der Junge laufen.", "Hunde laufen schnell."]


@pytest.fixture(scope="module")
def captions() -> ModuleType:
    return load_program(ROOT / "benchmarks" / "captions.py")


@pytest.mark.parametrize(
    ("caption", "written"),
    [
        ("der hund und eine frau", "Der Hund und eine Frau."),  # no capitals at all: the usual form of each word
        ("Der Junge sieht eine junge Frau", "Der Junge sieht eine junge Frau."),  # forms of the text stay as they are
        ("der Hund  und eine frau ,", "Der Hund und eine Frau."),
        ("Ein pferd und die Frau!", "Ein pferd und die Frau!"),  # a word that the text does not have stays
    ],
)
def test_a_caption_takes_the_case_and_the_full_stop_of_the_training_text(
    captions: ModuleType, caption: str, written: str
) -> None:
    assert list(captions.written_as([caption], TRAINING)) == [written]


def test_repeated_short_and_known_captions_are_left_out(captions: ModuleType) -> None:
    lines = ["Der Hund läuft schnell", "der hund läuft schnell", "Ein Hund", "die frau und der Junge laufen", ""]
    assert list(captions.written_as(lines, TRAINING)) == ["Der Hund läuft schnell."]
