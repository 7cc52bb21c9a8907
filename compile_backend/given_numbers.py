"""Numbers as a caller gives them: read as an array or a tensor, or refused by their name.

It knows how numbers may be written, and neither what they mean nor how many there should be.
"""

from __future__ import annotations

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
