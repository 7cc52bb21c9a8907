"""Attention by this project's own Triton kernels: every batch may be part of a graph.

Nothing here depends on lengths: grids hold for the worst case of a key, and the kernels read the
true lengths on the device. So there is no plan to renew before a replay.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, ClassVar

import torch

from compile_backend.attention.backend import AttentionBackend, on_host
from compile_backend.attention.requirements import it_needs, lacking_device, lacking_package
from compile_backend.attention.triton_plan import (
    LaunchPlan,
    plan_facts,
    plan_launch,
    plans_within,
)
from compile_backend.errors import ConfigError
from compile_backend.support import AttentionCGSupport

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from compile_backend.attention.kv_cache import LayerCache
    from compile_backend.attention.metadata import AttentionMetadata, BatchLimits
    from compile_backend.attention.spec import AttentionSpec, CacheFormat

logger = logging.getLogger(__name__)

MAX_HEAD_SIZE = 256
MAX_GROUP = 128
FP8_CAPABILITY = (8, 9)
_MOST_PLANS = 4096
CACHE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


class TritonAttention(AttentionBackend):
    """Runs wherever Triton does; on the CPU in its interpreter, to test.

    Keys and values are converted to the dtype of the queries, sums are kept in float32.
    """

    name: ClassVar[str] = "triton"
    support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    _limits: BatchLimits | None = None
    # Outputs that were not asked for since `expect`: attended, or quantised by a division (False)
    # or a product (True).
    _expected: AbstractSet[bool | None] = frozenset()

    def __init__(self, spec: AttentionSpec, cache: CacheFormat, device: torch.device) -> None:
        super().__init__(spec, cache, device)
        from compile_backend.attention.triton_cache import store_with_triton
        from compile_backend.attention.triton_launch import attend_with_triton, compile_for

        self._store = store_with_triton
        self._attend = attend_with_triton
        self._compile_for = compile_for
        # Queries are expected as wide as the cache; those of an 8-bit cache as half precision.
        self._element_bytes = max(2, cache.dtype.itemsize)
        self._plans: dict[tuple[int, ...], LaunchPlan] = {}
        self._distinct_plans: dict[LaunchPlan, LaunchPlan] = {}
        # Older devices have no such floats, and the interpreter rounds to them wrongly.
        self._writes_fp8 = (
            device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
        )
        self._num_sms = (
            torch.cuda.get_device_properties(device).multi_processor_count
            if device.type == "cuda"
            else 1
        )

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        """Triton, and a GPU; or the CPU with Triton's interpreter."""
        no_triton = lacking_package("triton", "triton")
        if no_triton is None and device.type == "cpu":
            if is_interpreted():
                return None
            return (
                "it needs a CUDA device (not device='cpu'), or TRITON_INTERPRET=1 in the "
                "environment before triton is imported, to test on the CPU"
            )
        return it_needs(lacking_device(device, minimum=(8, 0)), no_triton)

    @classmethod
    def unsupported(cls, spec: AttentionSpec, cache: CacheFormat) -> Exception | None:
        """Heads and groups that one program cannot hold, and caches of other types."""
        group = spec.num_heads // spec.num_kv_heads
        if spec.head_size > MAX_HEAD_SIZE:
            return ConfigError(
                "head_size",
                spec.head_size,
                "is more than one Triton program holds",
                f"use {MAX_HEAD_SIZE} or less, or another attention backend",
            )
        if group > MAX_GROUP:
            return ConfigError(
                "num_kv_heads",
                spec.num_kv_heads,
                f"makes groups of {group} query heads, more than one Triton program holds",
                f"use groups of {MAX_GROUP} or less, or another attention backend",
            )
        if spec.scale <= 0:
            return ConfigError("scale", spec.scale, "is not positive", "negate the queries")
        if cache.dtype not in CACHE_DTYPES:
            return ConfigError(
                "cache_dtype",
                cache.dtype,
                "is not read by the Triton kernels",
                f"use one of {', '.join(str(dtype) for dtype in CACHE_DTYPES)}",
            )
        if cache.dtype.itemsize == 1 and is_interpreted():
            return ConfigError(
                "cache_dtype",
                cache.dtype,
                "is rounded wrongly by Triton's interpreter",
                "use a GPU, or a wider dtype",
            )
        return None

    def expect(self, limits: BatchLimits) -> None:
        """The first batch is what tells how queries lie in memory: all is compiled with it."""
        self._limits, self._expected = limits, {None, False, True}

    @on_host
    def prepare(self, metadata: AttentionMetadata) -> LaunchPlan:
        """Tiles and splits for the batch, for queries of the usual dtype."""
        facts = plan_facts(metadata)
        plan = self._plans.get(facts)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
                self._distinct_plans.clear()
            plan = plan_launch(self.spec, metadata, self._element_bytes, self._num_sms)
            # Each layer compares the plan with that of its last launch: the very object is quick.
            plan = self._distinct_plans.setdefault(plan, plan)
            self._plans[facts] = plan
        return plan

    def store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
    ) -> None:
        """One launch, in the interpreter as well."""
        scales = cache.key_scale, cache.value_scale
        self._store(key, value, cache.keys, cache.values, metadata.slot_mapping, *scales)

    def attend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        prepared: LaunchPlan,
    ) -> None:
        """Attend and, where keys were split, reduce: one or two launches."""
        if None in self._expected:
            self._compile_all(query, output, cache, metadata, None, multiplies=False)
        prepared = self._plan_for(query, metadata, prepared)
        self._attend(query, output, cache, metadata, self.spec, prepared)

    def forward_fp8(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        scale: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        prepared: LaunchPlan,
        *,
        multiplies: bool,
    ) -> None:
        """The same launches; one more where the programs that attend do not quantise."""
        if not self._writes_fp8:
            super().forward_fp8(
                query,
                key,
                value,
                output,
                scale,
                cache,
                metadata,
                prepared,
                multiplies=multiplies,
            )
            return
        self.store(key, value, cache, metadata)
        if multiplies in self._expected:
            self._compile_all(query, output, cache, metadata, scale, multiplies=multiplies)
        prepared = self._plan_for(query, metadata, prepared)
        self._attend(
            query, output, cache, metadata, self.spec, prepared, scale, multiplies=multiplies
        )

    def _compile_all(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        scale: torch.Tensor | None,
        *,
        multiplies: bool,
    ) -> None:
        """Compile for all batches that are expected, as for this one: see `compile_for`."""
        limits = self._limits
        if limits is None or not output.numel():
            return
        self._expected = self._expected - {None if scale is None else multiplies}
        start = time.perf_counter()
        plans = plans_within(self.spec, limits, query.element_size(), self._num_sms)
        given = (query, output, cache, metadata, self.spec, scale)
        try:
            num_kernels = self._compile_for(plans, *given, multiplies=multiplies)
        except Exception as error:  # noqa: BLE001 - the launch itself will tell, or compile
            logger.warning("kernels of attention are compiled one by one: %s", error)
            return
        took = time.perf_counter() - start
        logger.info("%d kernels of attention compiled together in %.1f s", num_kernels, took)

    def _plan_for(
        self, query: torch.Tensor, metadata: AttentionMetadata, prepared: LaunchPlan
    ) -> LaunchPlan:
        """The plan of the step, or one for queries of another width."""
        if query.element_size() != self._element_bytes:
            return plan_launch(self.spec, metadata, query.element_size(), self._num_sms)
        return prepared


def is_interpreted() -> bool:
    """Whether Triton runs kernels in Python instead of compiling them."""
    from triton import knobs

    return bool(knobs.runtime.interpret)
