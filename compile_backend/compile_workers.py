"""The processes that compile kernels, started before anybody asks for one.

Inductor compiles a GPU's kernels in processes of its own. They take seconds to be ready, and until
then it compiles in this process, one kernel after the other. So where nothing was compiled before,
they start as soon as `torch.compile` looks this backend up, and come up while Dynamo traces; else
they start at the first piece that has to be compiled, if there is one. The hash of the compiler's
own files, which keys of kernels have in them, is made meanwhile. Results never depend on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from compile_backend.cache import cache_directory, cache_size_bytes
from compile_backend.errors import ConfigError
from compile_backend.torch_internals.inductor import hash_ahead, start_workers

if TYPE_CHECKING:
    from pathlib import Path


def start_where_all_is_new(options: object) -> None:
    """Start them if a model with these options surely has pieces to be compiled.

    Args:
        options: as given to `torch.compile`; they were not checked yet.
    """
    hash_ahead()
    given = options if isinstance(options, Mapping) else {}
    if given.get("piece_compiler", "inductor") != "inductor":
        return
    cache_dir = given.get("cache_dir")
    if cache_dir is not None and not isinstance(cache_dir, str):
        return
    with contextlib.suppress(ConfigError, OSError):  # told of when the options are read
        keeps = cache_size_bytes() > 0 and not given.get("disable_cache")
        if not keeps or not _holds_something(cache_directory(cache_dir)):
            start_workers()


def _holds_something(directory: Path) -> bool:
    return directory.is_dir() and next(directory.iterdir(), None) is not None
