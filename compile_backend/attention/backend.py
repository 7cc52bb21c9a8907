"""What an attention backend is: kernels that attend over a paged cache, and what it promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from compile_backend.attention.fp8_output import quantise
from compile_backend.attention.kv_cache import store
from compile_backend.support import AttentionCGSupport

if TYPE_CHECKING:
    from collections.abc import Callable

    from compile_backend.attention.kv_cache import LayerCache
    from compile_backend.attention.metadata import AttentionMetadata, BatchLimits
    from compile_backend.attention.spec import AttentionSpec, CacheFormat
    from compile_backend.batch import BatchDescriptor


_Method = TypeVar("_Method", bound="Callable[..., Any]")
_ON_HOST: set[object] = set()


def on_host(method: _Method) -> _Method:
    """Declares that a method that makes what a step needs reads none of the step's tensors.

    So they may be filled after it. For `AttentionBackend.prepare` and
    `AttentionMetadataBuilder.build`; one that overrides or replaces it declares that again, or
    does not.
    """
    _ON_HOST.add(method)
    return method


def is_on_host(method: object) -> bool:
    """Whether that was declared of a bound method."""
    return getattr(method, "__func__", None) in _ON_HOST


class AttentionBackend:
    """Attention of one or more layers that compute the same thing.

    Whoever subclasses it overrides `attend`, or else `forward` as a whole.

    Args:
        spec: what each layer computes.
        cache: how the cache is stored.
        device: where it runs.

    Attributes:
        name: stands for it in messages; in the registry, what users ask for.
        support: for which batches its kernels may be part of a graph. Whoever declares nothing is
            never captured.
        plans_every_step: whether `prepare_for_graph` must run before every replay, since kernels
            read plans that depend on the lengths; else once, before the capture, is enough.
    """

    name: ClassVar[str]
    support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    plans_every_step: ClassVar[bool] = False

    def __init__(self, spec: AttentionSpec, cache: CacheFormat, device: torch.device) -> None:
        self.spec = spec
        self.cache = cache
        self.device = device
        reason = self.unsupported(spec, cache)
        if reason is not None:
            raise reason

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        """What this machine lacks to run the backend, with the remedy; None if nothing.

        Args:
            device: where it would run.
        """
        del device
        return None

    @classmethod
    def unsupported(cls, spec: AttentionSpec, cache: CacheFormat) -> Exception | None:
        """The error for a layer that these kernels cannot compute; None if they can."""
        del spec, cache
        return None

    def expect(self, limits: BatchLimits) -> None:
        """Told by a runner, before its first batch, how large batches get.

        Kernels for all of them may be compiled together, so that none is while requests wait.

        Args:
            limits: of the batches; they hold for the dummy batches of captures, too.
        """
        del limits

    @on_host
    def prepare(self, metadata: AttentionMetadata) -> Any:
        """Whatever `forward` needs of a step outside of a full graph, made once for all layers.

        Args:
            metadata: with the true lengths in `metadata.host`.
        """
        del metadata
        return None

    def prepare_for_graph(self, metadata: AttentionMetadata, key: BatchDescriptor) -> Any:
        """The same for a step in a full graph: at addresses that stay for the key.

        Args:
            metadata: numbers of the host are the worst case; tensors hold the step's values. At
                replay `metadata.host` holds the true lengths if `plans_every_step`; before the
                capture it is None, and tensors hold a legal batch.
            key: whose graph reads it.
        """
        del key
        return self.prepare(metadata)

    @property
    def stores_apart(self) -> bool:
        """Whether `forward` is `store` and `attend`, so that each may run by itself."""
        is_own = type(self).forward is AttentionBackend.forward
        return is_own and "forward" not in vars(self)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        prepared: Any,
    ) -> None:
        """Store keys and values in the cache, then attend, and write `output`.

        Args:
            query: `[num_tokens, num_heads, head_size]`.
            key: `[num_tokens, num_kv_heads, head_size]`.
            value: like `key`.
            output: like `query`.
            cache: of the layer.
            metadata: of the step.
            prepared: what `prepare` or `prepare_for_graph` returned.
        """
        self.store(key, value, cache, metadata)
        self.attend(query, output, cache, metadata, prepared)

    def store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
    ) -> None:
        """Write each token's key and value to its slot in the cache; see `kv_cache.store`.

        A piece that makes them may hold this in its graph: nothing is read from the host, and
        nothing of the step but `metadata.slot_mapping`.

        Args:
            key: as for `forward`.
            value: likewise.
            cache: likewise.
            metadata: likewise.
        """
        store(key, value, cache, metadata.slot_mapping)

    def attend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        prepared: Any,
    ) -> None:
        """Attend over what the cache holds, this step's keys and values included.

        Args:
            query: as for `forward`.
            output: likewise.
            cache: likewise.
            metadata: likewise.
            prepared: likewise.
        """
        raise NotImplementedError(
            f"{type(self).__name__} computes nothing; override `attend`, or `forward`"
        )

    def forward_fp8(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        scale: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        prepared: Any,
        *,
        multiplies: bool,
    ) -> None:
        """Store, attend and write 8-bit floats, rounded to the queries' dtype in between.

        Kernels that can write them by themselves do so in their own `forward_fp8`, to the same
        numbers. For all others, attention goes to memory that is taken here.

        Args:
            query: as for `forward`, and so are all arguments that are not told here.
            key: likewise.
            value: likewise.
            output: `[num_tokens, num_heads, head_size]` `torch.float8_e4m3fn`.
            scale: float32, one element, on the device.
            cache: of the layer.
            metadata: of the step.
            prepared: as for `forward`.
            multiplies: by the scale, instead of a division by it.
        """
        wide = torch.empty(output.shape, dtype=query.dtype, device=query.device)
        self.forward(query, key, value, wide, cache, metadata, prepared)
        quantise(wide, output, scale, multiplies=multiplies)
