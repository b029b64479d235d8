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
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith("/jax/core/compile/") or event.startswith("/jax/compilation_cache/cache_retrieval"):
            self.seconds[COMPILING] += duration_secs

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Adds the time of the block to `name`, less what it compiled."""
        began, compiled = time.perf_counter(), self.seconds[COMPILING]
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began - (self.seconds[COMPILING] - compiled)
