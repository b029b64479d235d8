"""Ctrl-C and SIGTERM, so that long work can end where it can go on from."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax


@contextmanager
def catch_signals() -> Iterator[list[str]]:
    """Collects the names of SIGTERM and SIGINT instead of dying of them; a second one takes effect at once.

    Several processes do not stop at the same step by themselves, so there signals keep their usual effect.
    """
    caught: list[str] = []
    before: dict[int, Any] = {}

    def on_signal(number: int, _: Any) -> None:
        caught.append(signal.Signals(number).name)
        signal.signal(number, before[number])

    try:
        if jax.process_count() == 1:
            for number in (signal.SIGTERM, signal.SIGINT):
                before[number] = signal.signal(number, on_signal)
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
