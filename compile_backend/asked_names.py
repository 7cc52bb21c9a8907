"""Names in a config that only others know: settings of Inductor, and passes.

A config is checked where it is made, without a look at torch or at passes; whoever works by one
asks here first.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from compile_backend.errors import ConfigError
from compile_backend.pipeline import checked_passes
from compile_backend.torch_internals.inductor_settings import expected_type, setting_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from compile_backend.config import CompilationConfig


def check_asked(config: CompilationConfig) -> None:
    """Refuse what a config asks for and nobody has.

    Raises:
        ConfigError: Inductor has no setting of a name, or one of another type; a pass cannot be
            found, or has the name of another one.
    """
    _check_settings("inductor_compile_config", config.inductor_compile_config)
    if config.compile_sizes:
        _check_settings("compile_sizes_config", config.compile_sizes_config)
    checked_passes(config.inductor_passes)


def _check_settings(option: str, settings: Mapping[str, Any]) -> None:
    known = setting_names() if settings else frozenset()
    for name, value in settings.items():
        if name not in known:
            close = difflib.get_close_matches(name.replace("-", "_"), sorted(known), n=3)
            near = f"did you mean {' or '.join(close)}? " if close else ""
            fix = f"{near}torch._inductor.list_options() names all"
            raise ConfigError(option, {name: value}, "is no setting of Inductor's", fix)
        expected = expected_type(name, value)
        if expected is not None:
            problem = f"holds {type(value).__name__}, not {expected.__name__}"
            fix = f"give it {expected.__name__}"
            raise ConfigError(option, {name: value}, problem, fix)
