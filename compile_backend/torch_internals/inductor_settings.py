"""Which settings Inductor has, and what they hold."""

from __future__ import annotations

import typing
from typing import Any


def setting_names() -> frozenset[str]:
    """The names of all settings, `triton.cudagraphs` and such among them."""
    import torch._inductor.config as config

    return frozenset(config._config)  # type: ignore[attr-defined]


def expected_type(name: str, value: Any) -> type | None:
    """The type that a setting has and a value has not; None where the value is as good.

    Args:
        name: of a setting.
        value: for it.
    """
    import torch._inductor.config as config

    expected = config.get_type(name)  # type: ignore[attr-defined]
    is_plain = typing.get_origin(expected) is None and isinstance(expected, type)
    if not is_plain or expected in (type(None), object) or isinstance(value, expected):
        return None
    return None if expected is float and isinstance(value, int) else expected
