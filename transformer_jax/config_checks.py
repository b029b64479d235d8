"""What a setting must be: each check raises one sentence that names the setting and its value."""

from __future__ import annotations

from typing import Any

from transformer_jax.errors import UserError


def check(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def one_of(config: Any, **allowed: tuple[str, ...]) -> None:
    for name, values in allowed.items():
        value = getattr(config, name)
        check(value in values, f"{name} is {value!r}; it must be one of {', '.join(values)}.")


def not_below(config: Any, minimum: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        check(isinstance(value, int), f"{name} is {value!r}; it must be a whole number.")
        check(value >= minimum, f"{name} is {value}; it must be at least {minimum}.")


def probabilities(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        check(0.0 <= value < 1.0, f"{name} is {value}; it must be at least 0 and below 1.")
