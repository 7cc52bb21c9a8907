"""Private names of Inductor: code for sizes that change which holds for a size of 1, too.

Dynamo can be told to assume of no size that it is not 1. Inductor then still assumes it where it
makes a view of what is not contiguous, and where it joins a tensor with itself, and every model is
compiled once more for batches of one token. Here it does what holds for all sizes, if there is
such a way. Compiles that were not told so are left alone.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class _OfThread(threading.local):
    is_asked = False


_COMPILE = _OfThread()
_INSTALLING = threading.Lock()


@contextlib.contextmanager
def size_1_like_others(config_patches: Mapping[str, Any]) -> Iterator[bool]:
    """Have Inductor assume of no size that it is not 1, where Dynamo was told so.

    Args:
        config_patches: settings of Inductor's, on which its decompositions depend.

    Returns:
        Whether Dynamo was.
    """
    from torch.fx.experimental import _config

    if not _config.backed_size_oblivious:
        yield False
        return
    with _INSTALLING:
        _install()
        with torch._inductor.config.patch(dict(config_patches)):
            _install_in_decompositions()
    was_asked, _COMPILE.is_asked = _COMPILE.is_asked, True
    try:
        yield True
    finally:
        _COMPILE.is_asked = was_asked


def _install_in_decompositions() -> None:
    """Wrap the decomposition of what is joined, once for each table there is."""
    from torch._inductor.decomposition import select_decomp_table

    table, cat = select_decomp_table(), torch.ops.aten.cat.default
    decomposed = table.get(cat)
    if decomposed is None or hasattr(decomposed, "__wrapped__"):
        return

    @functools.wraps(decomposed)
    def decompose(tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
        is_one = len(tensors) > 1 and all(tensor is tensors[0] for tensor in tensors)
        return NotImplemented if is_one and _COMPILE.is_asked else decomposed(tensors, dim)

    table[cat] = decompose


def _install() -> None:
    """Wrap what Inductor asks for the strides of a view, once for the process."""
    from torch._subclasses import fake_impls

    original = getattr(fake_impls, "_compute_stride", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def compute_stride(
        old_shape: Any,
        old_stride: Any,
        new_shape: Any,
        size_oblivious: bool = False,  # noqa: FBT001 - as it is called
    ) -> Any:
        if _COMPILE.is_asked and not size_oblivious:
            found = original(old_shape, old_stride, new_shape, size_oblivious=True)
            if found is not None:
                return found
        return original(old_shape, old_stride, new_shape, size_oblivious=size_oblivious)

    fake_impls._compute_stride = compute_stride
