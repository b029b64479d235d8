"""What a user sees while a run trains: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


class Progress:
    """Counts steps and target tokens, and shows loss, rate, speed and the time that is left, on standard error."""

    LINE_EVERY_SECONDS = 10.0

    def __init__(self, n_steps: int, first: int) -> None:
        self.n_steps, self.first = n_steps, first
        self._terminal = sys.stderr.isatty()
        self._bar: Any = None
        self._began = self._shown = time.monotonic()
        self._window: list[tuple[float, float, float]] = []
        self._paused = 0.0

    def __enter__(self) -> Progress:
        if self._terminal:
            from tqdm import tqdm

            self._bar = tqdm(total=self.n_steps, initial=self.first, unit="step", dynamic_ncols=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def step(self, step: int, tokens: float, loss: float, rate: float, waited: float = 0.0) -> tuple[float, float]:
        """Counts a step. Returns the speed of the last steps in target tokens per second, and the share of their time
        that the loop waited for data; `waited` is how long this step did, in seconds."""
        now = time.monotonic() - self._paused
        self._window = [*self._window[-50:], (now, tokens, waited)]
        elapsed = now - self._window[0][0]
        speed = sum(n for _, n, _ in self._window[1:]) / elapsed if elapsed > 0 else 0.0
        wait = min(1.0, sum(seconds for _, _, seconds in self._window[1:]) / elapsed) if elapsed > 0 else 0.0
        if self._bar is not None:
            self._bar.update(1)
            self._bar.set_postfix_str(f"loss {loss:.3f}, rate {rate:.2e}, {speed:,.0f} tokens/s", refresh=False)
        elif time.monotonic() - self._shown >= self.LINE_EVERY_SECONDS or step == self.n_steps:
            self._shown = time.monotonic()
            per_step = elapsed / max(1, len(self._window) - 1)
            minutes, seconds = divmod(round(per_step * (self.n_steps - step)), 60)
            left = f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
            self.say(f"step {step:>7,}  loss {loss:.4f}  rate {rate:.2e}  {speed:,.0f} tokens/s  left {left}")
        return speed, wait

    def pause(self, seconds: float) -> None:
        """Leaves time spent on something else (an evaluation) out of the speed."""
        self._paused += seconds

    @staticmethod
    def say(message: str) -> None:
        """A line on standard error that does not break the bar."""
        if sys.stderr.isatty():
            from tqdm import tqdm

            tqdm.write(message, file=sys.stderr)
        else:
            print(message, file=sys.stderr, flush=True)
