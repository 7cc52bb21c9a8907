"""The errors a user meets: each says what is wrong and what to do. How messages show values.

This file refuses to know where errors are raised.
"""

from __future__ import annotations

from enum import Enum

_MOST_SHOWN = 400


def shown(value: object) -> str:
    """A value as messages show it: members by name, and what is long in short.

    What takes several lines, such as a model or a tensor, is named by its class.
    """
    if isinstance(value, Enum):
        return value.name
    text = repr(value)
    if "\n" in text:
        return f"<{type(value).__name__}>"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def number_of(thing: str, count: int) -> str:
    """A count in words: `1 token`, `2 tokens`."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


class ConfigError(ValueError):
    """An option holds what it cannot hold, or asks for what cannot be had.

    Attributes:
        option: the option's name.
        value: what it was set to.
        problem: why that cannot be, as the rest of a sentence: "must ascend".
        fix: what to write instead, as a command: "use (4, 8)".
    """

    def __init__(self, option: str, value: object, problem: str, fix: str) -> None:
        super().__init__(option, value, problem, fix)
        self.option = option
        self.value = value
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.option}={shown(self.value)} {self.problem}; {self.fix}"


class CaptureError(RuntimeError):
    """Something was called in the wrong state, or a graph could not be captured."""
