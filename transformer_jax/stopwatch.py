"""Where the time of a translation goes: compiling, and all else."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

import jax

COMPILING = "compile"


class Stopwatch:
    """Seconds by name. What JAX spends on compiling counts there only, wherever it happens."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._compiled: list[tuple[float, float]] = []
        """Start and duration of what was compiled, one after another, none inside another."""
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        """JAX tells of a step when it is over: tracing a function comes after tracing those that it calls, which are
        part of it."""
        if not event.startswith("/jax/core/compile/"):
            return
        start = time.perf_counter() - duration_secs
        while self._compiled and self._compiled[-1][0] >= start:
            self.seconds[COMPILING] -= self._compiled.pop()[1]
        self._compiled.append((start, duration_secs))
        self.seconds[COMPILING] += duration_secs

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Adds the time of the block to `name`, less what it compiled."""
        began, compiled = time.perf_counter(), self.seconds[COMPILING]
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began - (self.seconds[COMPILING] - compiled)
