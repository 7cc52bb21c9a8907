"""The errors a user meets: each says what is wrong and what to do.

This file refuses to know where errors are raised.
"""

from __future__ import annotations

from enum import Enum


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
        shown = self.value.name if isinstance(self.value, Enum) else repr(self.value)
        return f"{self.option}={shown} {self.problem}; {self.fix}"


class CaptureError(RuntimeError):
    """Something was called in the wrong state, or a graph could not be captured."""
