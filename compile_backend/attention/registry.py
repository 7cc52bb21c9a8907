"""Which attention backends there are, and the best one for a layer on a device.

A row for every backend that the project knows a support level of, also those that need other
hardware: asked for on the wrong machine, they say what they need. A class of the user's own needs
no row: it is given itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from compile_backend.attention.backend import AttentionBackend
from compile_backend.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from compile_backend.attention.spec import AttentionSpec, CacheFormat


@dataclass(frozen=True, slots=True)
class BackendRow:
    """One backend.

    Attributes:
        name: what users ask for.
        module: where its class is; empty where this package has none.
        class_name: in that module.
        needs: hardware and packages of one that is not built here.
        auto_on: types of device where `auto` may take it.
    """

    name: str
    module: str = ""
    class_name: str = ""
    needs: str = ""
    auto_on: tuple[str, ...] = ("cuda",)

    def load(self) -> type[AttentionBackend]:
        """The class; importing it needs none of the optional packages."""
        found: type[AttentionBackend] = getattr(import_module(self.module), self.class_name)
        return found


_HERE = "compile_backend.attention"

BACKENDS = (
    BackendRow("flash_attn_3", f"{_HERE}.flash_attn3", "FlashAttention3"),
    BackendRow("triton", f"{_HERE}.triton_attention", "TritonAttention"),
    BackendRow("flash_attn_2", f"{_HERE}.flash_attn2", "FlashAttention2"),
    BackendRow("flashinfer", f"{_HERE}.flashinfer", "FlashInfer"),
    BackendRow("flex_attention", f"{_HERE}.flex", "FlexAttention"),
    BackendRow("sdpa", f"{_HERE}.sdpa", "SdpaAttention", auto_on=("cuda", "cpu")),
    BackendRow("flashinfer_trtllm", needs="an NVIDIA Blackwell GPU and TRTLLM cubins"),
    BackendRow("flashmla", needs="a model with multi-head latent attention, and FlashMLA"),
    BackendRow("flashinfer_mla", needs="a model with multi-head latent attention, on Blackwell"),
    BackendRow("flashinfer_mla_sparse", needs="sparse latent attention, on Blackwell"),
    BackendRow("aiter_flash_attn", needs="an AMD Instinct GPU and AITER"),
    BackendRow("aiter_mla", needs="an AMD Instinct GPU, AITER and latent attention"),
    BackendRow("cutlass_mla", needs="a model with multi-head latent attention, on Blackwell"),
    BackendRow("mamba", needs="a model with state-space layers instead of attention"),
)
"""Every backend by name; `auto` takes the first that can run."""

AUTO = "auto"


def make_backend(
    backend: str | type[AttentionBackend],
    spec: AttentionSpec,
    cache: CacheFormat,
    device: torch.device,
) -> AttentionBackend:
    """A backend for layers that compute `spec`.

    Args:
        backend: the name of a row, `auto` for the first row that can run here, or a class of your
            own.
        spec: what the layers compute.
        cache: how their caches are stored.
        device: where they run.

    Raises:
        ConfigError: there is no such backend, or it cannot run here; it says what is missing.
    """
    if isinstance(backend, type):
        return _checked(backend, spec, cache, device)(spec, cache, device)
    return _class_of(backend, spec, cache, device)(spec, cache, device)


def _checked(
    backend: type, spec: AttentionSpec, cache: CacheFormat, device: torch.device
) -> type[AttentionBackend]:
    """A class of the user's own, if it is one that can run here."""
    if not issubclass(backend, AttentionBackend):
        raise ConfigError(
            "backend",
            backend.__name__,
            "is no attention backend",
            "use a subclass of AttentionBackend, or a name",
        )
    problem = _problem(backend, spec, cache, device)
    if problem is not None:
        raise problem
    return backend


def _class_of(
    name: str, spec: AttentionSpec, cache: CacheFormat, device: torch.device
) -> type[AttentionBackend]:
    if name == AUTO:
        for candidate in BACKENDS:
            if candidate.module and device.type in candidate.auto_on:
                backend = candidate.load()
                if _problem(backend, spec, cache, device) is None:
                    return backend
        raise ConfigError(
            "backend",
            AUTO,
            f"finds none for {spec} on device {str(device)!r}",
            "name one, and it will say what it lacks",
        )
    row = {row.name: row for row in BACKENDS}.get(name)
    if row is None:
        names = ", ".join((AUTO, *(row.name for row in BACKENDS)))
        raise ConfigError("backend", name, "is not known", f"use one of {names}")
    if not row.module:
        raise ConfigError(
            "backend",
            name,
            f"cannot run here: it needs {row.needs}",
            "use auto, or one of " + ", ".join(row.name for row in BACKENDS if row.module),
        )
    return _checked(row.load(), spec, cache, device)


def lacking(name: str, device: torch.device) -> str | None:
    """What a device lacks for any layer of a backend of this package, with the remedy.

    Args:
        name: a known one; `auto` lacks nothing that could be told without a layer.
        device: where it would run.
    """
    row = next((row for row in BACKENDS if row.name == name), None)
    if row is None:
        return None
    return row.load().missing(device) if row.module else f"it needs {row.needs}"


def _problem(
    backend: type[AttentionBackend], spec: AttentionSpec, cache: CacheFormat, device: torch.device
) -> Exception | None:
    missing = backend.missing(device)
    if missing is not None:
        name = getattr(backend, "name", backend.__name__)
        return ConfigError("backend", name, "cannot run here", missing)
    return backend.unsupported(spec, cache)
