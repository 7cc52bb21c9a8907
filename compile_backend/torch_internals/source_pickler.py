"""Bytes of what Dynamo made, in which sources mean the same in every process.

A source is how Dynamo names a value of a call, such as `L['self'].weight`. It carries
caches, among them hashes that other processes do not agree on. Only its fields are written.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import uuid
from typing import TYPE_CHECKING, Any

from compile_backend.cache import NotStorableError

if TYPE_CHECKING:
    from collections.abc import Mapping

_OF_THIS_PROCESS = uuid.uuid4().hex


def global_name(module_name: str) -> str:
    """What a module is called among the globals in this process.

    Dynamo makes such names of addresses and of numbers that begin at 0 in each process.
    """
    return f"__stored_{_OF_THIS_PROCESS}_{module_name.replace('.', '_dot_')}"


def written(value: object, modules: Mapping[str, str]) -> bytes:
    """A value as bytes.

    Args:
        value: of plain data, sizes, and sources.
        modules: what modules were called among the globals, and their names; `global_name` tells
            what they are called after reading.

    Raises:
        NotStorableError: something in it cannot be written.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, modules).dump(value)
    except NotStorableError:
        raise
    except Exception as error:
        raise NotStorableError(f"cannot be written down ({error})") from error
    return buffer.getvalue()


def read(data: bytes) -> Any:
    """What `written` was given; whatever is wrong with the bytes may raise anything."""
    return pickle.loads(data)  # noqa: S301 - of this user, see `cache`


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, modules: Mapping[str, str]) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._modules = modules

    def reducer_override(self, value: object) -> Any:
        from torch._dynamo.source import GlobalSource
        from torch._guards import Source

        if not isinstance(value, Source) or not dataclasses.is_dataclass(value):
            return NotImplemented
        if isinstance(value, GlobalSource) and value.global_name in self._modules:
            return _source_of_module, (self._modules[value.global_name],)
        fields = [field for field in dataclasses.fields(value) if field.init]
        given = {field.name: getattr(value, field.name) for field in fields}
        return _source, (type(value), given)


def _source(kind: Any, fields: dict[str, Any]) -> Any:
    return kind(**fields)


def _source_of_module(name: str) -> Any:
    from torch._dynamo.source import GlobalSource

    return GlobalSource(global_name(name))
