"""Numbers as a caller gives them: read as an array or a tensor, or refused by their name.

It knows how numbers may be written, and neither what they mean nor how many there should be.
"""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt


_EVEN = "fill the shorter ones up, with 0"


def array_of(name: str, value: Any, even: str = _EVEN) -> npt.NDArray[Any]:
    """Numbers as an array, of whatever dtype they have.

    Args:
        name: of what was given, as messages show it.
        value: numbers, an array or a tensor of the host.
        even: what to do about rows of different lengths.

    Raises:
        ValueError: its rows have different lengths, or nobody can read it here.
    """
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _unreadable(name, error, even) from error


def integers_of(name: str, value: Any, even: str = _EVEN) -> npt.NDArray[Any]:
    """Numbers as an array, of integers if they are such, each in whatever type.

    For unsigned integers of 64 bits beside others numpy knows no common type but floats.

    Args:
        name: as for `array_of`.
        value: likewise.
        even: likewise.

    Raises:
        ValueError: as for `array_of`, or these integers have no common type of 64 bits.
    """
    array = array_of(name, value, even)
    if array.dtype.kind not in "fO" or not array.size:
        return array
    items = np.asarray(value, dtype=object)
    if not all(isinstance(item, Integral) and not isinstance(item, bool) for item in items.flat):
        return array
    numbers = [int(item) for item in items.flat]
    lowest, highest = min(numbers), max(numbers)
    for dtype in (np.int64, np.uint64):
        if np.iinfo(dtype).min <= lowest and highest <= np.iinfo(dtype).max:
            return np.array(numbers, dtype).reshape(items.shape)
    raise ValueError(
        f"{name} holds {lowest} to {highest}, which integers of 64 bits do not; change the numbers"
    )


def tensor_of(name: str, value: Any) -> torch.Tensor:
    """Numbers as a tensor, for element types that arrays lack.

    Raises:
        ValueError: as for `array_of`.
    """
    if isinstance(value, np.ndarray):  # torch takes neither other orders of bytes nor of rows
        value = np.ascontiguousarray(value, value.dtype.newbyteorder("="))
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _unreadable(name, error) from error


def check_has_rows(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose numbers do not lie in rows, or nowhere.

    Raises:
        ValueError: it is on the device meta, sparse, nested or quantised.
    """
    if tensor.is_meta:
        raise ValueError(
            f"{name} is a tensor on the device meta, which holds no numbers; give one with data"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        kind = str(tensor.dtype) if tensor.is_quantized else kind
        raise ValueError(f"{name} is a tensor of another kind ({kind}); give a dense one")


def _unreadable(name: str, error: Exception, even: str = _EVEN) -> ValueError:
    reason = str(error).strip().partition("\n")[0].rstrip(".")
    # The words of numpy and of torch, which name no input.
    if "inhomogeneous" in reason or "expected sequence of length" in reason:
        return ValueError(f"{name} has rows of different lengths; {even}")
    return ValueError(f"{name} cannot be read: {reason}; give numbers that lie on the host")
