"""FlashInfer's kernels, planned on the host: which block of threads does what, for true lengths.

A plan depends on the lengths, so it is made anew before every step, also before a replay. Only
batches of one token per request can be captured: there the package promises that grid and
addresses stay as they are while lengths change.

This file refuses to know how graphs are captured.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import cache as cached
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from compile_backend.attention.backend import AttentionBackend
from compile_backend.attention.page_plan import PagePlan, plan_pages, query_starts
from compile_backend.attention.requirements import it_needs, lacking_device, lacking_package
from compile_backend.errors import ConfigError
from compile_backend.support import AttentionCGSupport

if TYPE_CHECKING:
    from compile_backend.attention.kv_cache import LayerCache
    from compile_backend.attention.metadata import AttentionMetadata
    from compile_backend.attention.spec import AttentionSpec, CacheFormat
    from compile_backend.batch import BatchDescriptor

REQUIREMENT = "flashinfer-python==0.6.6"
"""The release that these calls were checked against."""

_HEAD_SIZES = (64, 128, 256)
_CACHE_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)
# Partial results of split keys: heads x blocks of threads x rows of a tile x head size in float32,
# at most 264 * 8 * 128 * 256 * 4 bytes times what a plan's rounding adds.
_WORKSPACE_BYTES = 394 * 1024 * 1024


def wants_tensor_cores(spec: AttentionSpec, cache: CacheFormat) -> bool:
    """Whether decode is faster, or possible at all, as a matrix product.

    The heads that share keys and values are its rows; below four the plain kernels keep up, and
    those exist for groups of 1, 2, 3, 4 and 8.
    """
    return spec.num_heads // spec.num_kv_heads >= 4 or cache.dtype.itemsize == 1


@cached
def _workspace(device: torch.device) -> torch.Tensor:
    """One for all backends of a device: kernels use it in turn, each within one call."""
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@dataclass(frozen=True, slots=True)
class _Step:
    """A planned step: whose kernels run it, and over how many rows."""

    kernels: Any
    num_tokens: int


class FlashInfer(AttentionBackend):
    """FlashInfer on Ampere and later; kernels are compiled when first planned, and kept on disk.

    With a cache of 8-bit floats, queries are expected in bfloat16; else in the cache's dtype.

    Attributes:
        prefill_kernels: FlashInfer's name for those of every other batch. "fa3" and "auto" are
            made for Hopper and take the compiler many times as long; Hopper has the backend
            `flash_attn_3`, whose kernels come compiled.

    Source: Ye et al., "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference
    Serving", 2025.
    """

    name: ClassVar[str] = "flashinfer"
    support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    plans_every_step: ClassVar[bool] = True
    prefill_kernels: ClassVar[str] = "fa2"

    def __init__(self, spec: AttentionSpec, cache: CacheFormat, device: torch.device) -> None:
        super().__init__(spec, cache, device)
        import flashinfer

        workspace = _workspace(device)
        self.wants_tensor_cores = wants_tensor_cores(spec, cache)
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", backend=self.prefill_kernels
        )
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=self.wants_tensor_cores
        )
        # Planning again overwrites pinned memory that copies may still read.
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._graphs: dict[BatchDescriptor, _DecodeGraph] = {}

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        """A GPU of the last generations, the package, and a compiler or compiled kernels."""
        return it_needs(
            lacking_device(device, minimum=(8, 0)),
            lacking_package("flashinfer", REQUIREMENT),
            lacking_compiler(),
        )

    @classmethod
    def unsupported(cls, spec: AttentionSpec, cache: CacheFormat) -> Exception | None:
        """Caches and heads that there are no kernels for."""
        if cache.dtype not in _CACHE_DTYPES:
            return ConfigError(
                "cache_dtype",
                cache.dtype,
                "has no kernels in FlashInfer",
                "use torch.bfloat16, torch.float16 or torch.float8_e4m3fn, or attention backend "
                "'triton'",
            )
        if spec.head_size not in _HEAD_SIZES:
            return ConfigError(
                "head_size",
                spec.head_size,
                f"has no kernels in FlashInfer, which has {', '.join(map(str, _HEAD_SIZES))}",
                "use attention backend 'triton'",
            )
        return None

    def prepare(self, metadata: AttentionMetadata) -> _Step | None:
        """Plan a step with its true lengths."""
        host = metadata.host
        assert host is not None, "a plan needs the true lengths"
        num_reqs = len(host.query_lens)
        if not num_reqs:
            return None
        starts = query_starts(host.query_lens)
        num_tokens = int(starts[-1])
        pages = plan_pages(host.seq_lens, host.block_table, self.cache.block_size, num_reqs)
        arrays = [pages.indptr, pages.indices, pages.last_page_len]
        kernels, options = self._decode, self._plan_options()
        if num_tokens != num_reqs or host.query_lens.max() > 1:
            kernels, options["causal"] = self._prefill, True
            arrays.insert(0, starts)
        self._copied.synchronize()
        kernels.plan(*map(torch.from_numpy, arrays), *self._sizes(), **options)
        self._copied.record()
        return _Step(kernels, num_tokens)

    def prepare_for_graph(self, metadata: AttentionMetadata, key: BatchDescriptor) -> _Step:
        """Plan a decode step at addresses that stay for the key; padding reads block 0."""
        graph = self._graphs.get(key)
        if graph is None:
            graph = _DecodeGraph(self, metadata.num_reqs)
            self._graphs[key] = graph
        host = metadata.host
        if host is None:
            seq_lens, block_table = np.zeros(0, np.int32), np.zeros((0, 0), np.int32)
        else:
            seq_lens, block_table = host.seq_lens, host.block_table
        graph.plan(
            plan_pages(seq_lens, block_table, self.cache.block_size, metadata.num_reqs),
            self._sizes(),
            self._plan_options(),
        )
        return _Step(graph.kernels, metadata.num_reqs)

    def attend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        prepared: _Step | None,
    ) -> None:
        """See `AttentionBackend.attend`."""
        del metadata
        if prepared is None:
            return
        prepared.kernels.run(
            query[: prepared.num_tokens],
            (cache.keys, cache.values),
            out=output[: prepared.num_tokens],
            k_scale=None if cache.key_scale == 1 else cache.key_scale,
            v_scale=None if cache.value_scale == 1 else cache.value_scale,
        )

    def _sizes(self) -> tuple[int, int, int, int]:
        spec = self.spec
        return spec.num_heads, spec.num_kv_heads, spec.head_size, self.cache.block_size

    def _plan_options(self) -> dict[str, Any]:
        cache_dtype = self.cache.dtype
        return {
            "window_left": self.spec.window_left,
            "logits_soft_cap": self.spec.soft_cap,
            "q_data_type": cache_dtype if cache_dtype.itemsize > 1 else torch.bfloat16,
            "kv_data_type": cache_dtype,
            "sm_scale": self.spec.scale,
        }


class _DecodeGraph:
    """The decode kernels of one graph, with the memory that it reads its pages from.

    Args:
        backend: whose layers the graph holds.
        num_reqs: of the graph, padding included.

    Attributes:
        kernels: FlashInfer's wrapper.
    """

    def __init__(self, backend: FlashInfer, num_reqs: int) -> None:
        import flashinfer

        # One buffer, so that one copy renews all three parts.
        most_pages = num_reqs * backend.cache.max_blocks_per_req
        self._ends = (num_reqs + 1, 2 * num_reqs + 1)
        size = self._ends[1] + most_pages
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=True)
        self._device = torch.zeros(size, dtype=torch.int32, device=backend.device)
        indptr, last_page_len, indices = self._parts(self._device)
        self.kernels = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(backend.device),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=backend.wants_tensor_cores,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last_page_len,
        )
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._plan_again = flashinfer.fast_decode_plan
        self._is_planned = False

    def plan(self, pages: PagePlan, sizes: tuple[int, ...], options: dict[str, Any]) -> None:
        """Write the pages to where the graph reads them, and plan."""
        self._copied.synchronize()
        indptr, last_page_len, indices = self._parts(self._host)
        num_pages = len(pages.indices)
        indptr.numpy()[:] = pages.indptr
        last_page_len.numpy()[:] = pages.last_page_len
        indices.numpy()[:num_pages] = pages.indices
        used = self._ends[1] + num_pages
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        on_device = self._device[self._ends[1] : used]
        if self._is_planned:
            # The package's own short cut: the same plan without copies and checks.
            self._plan_again(
                self.kernels,
                indptr,
                on_device,
                last_page_len,
                *sizes,
                global_override_indptr_cpu=indptr,
                **options,
            )
        else:
            self.kernels.plan(indptr, on_device, last_page_len, *sizes, **options)
            self._is_planned = True
        self._copied.record()

    def _parts(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Its indptr, last page lengths and indices."""
        first, second = self._ends
        return buffer[:first], buffer[first:second], buffer[second:]


def lacking_compiler() -> str | None:
    """The compiler that FlashInfer needs; None if there is one, or kernels compiled before."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    has_nvcc = shutil.which("nvcc") is not None or (Path(home) / "bin" / "nvcc").is_file()
    if has_nvcc or find_spec("flashinfer_jit_cache") is not None:
        return None
    return (
        "nvcc to compile kernels (install the CUDA toolkit, or pip install flashinfer-jit-cache)"
    )
