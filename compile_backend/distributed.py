"""Ranks agree on mode and size before each step: the lowest mode and the largest size win.

Steps of a model over several processes exchange data inside, so each rank must take part in every
step, and with tensors of one size. Each rank tells what it would do by itself, and dispatches
again under what all can do. Who runs the step, and on what, is not known here.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from compile_backend.config import CUDAGraphMode, at_least
from compile_backend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from compile_backend.batch import BatchDescriptor
    from compile_backend.dispatch import CudagraphDispatcher, Route

    Least = Callable[[Sequence[int]], Sequence[int]]

_FULL = CUDAGraphMode.FULL


class RankAgreement:
    """What the ranks of a group do together; each calls the same methods in the same order.

    Args:
        least: given as many numbers on each rank, the least of each over all ranks.

    Raises:
        ConfigError: that cannot be called.
    """

    def __init__(self, least: Least) -> None:
        given: object = least
        if not callable(given):
            fix = "use RankAgreement.over(group)"
            raise ConfigError("least", given, "cannot be called", fix)
        self._least = least

    @classmethod
    def over(cls, group: dist.ProcessGroup | None = None) -> RankAgreement:
        """The agreement of the ranks of a process group.

        Each exchange is one small reduction between the hosts, whatever the devices do.

        Args:
            group: of `torch.distributed`; None is the default one.

        Raises:
            ConfigError: there is no process group, this rank is not in it, or it carries no
                tensors of the CPU.
        """
        is_group = dist.is_available() and isinstance(group, dist.ProcessGroup)
        if group is not None and not is_group:
            raise ConfigError(
                "group",
                group,
                "is no process group that this rank is in",
                "use what torch.distributed.new_group returned on its members, or None",
            )
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                "group",
                group,
                "has no ranks, since torch.distributed is not initialised",
                "call torch.distributed.init_process_group first",
            )
        backends = dist.get_backend_config(group)
        if "cpu:" not in backends:
            raise ConfigError(
                "group",
                backends,
                "carries no tensors of the CPU, and hosts agree without their devices",
                "use torch.distributed.new_group(backend='gloo')",
            )

        def least(numbers: Sequence[int]) -> list[int]:
            sent = torch.tensor(numbers, dtype=torch.int64, device="cpu")
            dist.all_reduce(sent, dist.ReduceOp.MIN, group)
            return [int(number) for number in sent.tolist()]

        return cls(least)

    def agree(self, mode: CUDAGraphMode | str, num_tokens: int) -> tuple[CUDAGraphMode, int]:
        """The lowest mode and the largest size of all ranks.

        Args:
            mode: NONE, PIECEWISE or FULL, or the name: what this rank's dispatcher chose; FULL
                for a rank that has nothing to run.
            num_tokens: of this rank's batch; 0 for such a rank.

        Raises:
            ConfigError: there is no such mode of a single batch, or no such number of tokens.
        """
        mode = CUDAGraphMode.parse_single(mode, option="mode")
        return self._agree(mode, at_least(0)("num_tokens", num_tokens))

    def _agree(self, mode: CUDAGraphMode, num_tokens: int) -> tuple[CUDAGraphMode, int]:
        lowest, largest = self._least((mode.value, -num_tokens))
        return CUDAGraphMode(lowest), -largest

    def dispatch(
        self,
        dispatcher: CudagraphDispatcher,
        descriptor: BatchDescriptor,
        *,
        use_cascade_attn: bool = False,
        all_decode: bool | None = None,
        highest_mode: CUDAGraphMode | str | None = None,
    ) -> Route:
        """Where this rank's batch goes: for all ranks the same mode and the same size.

        At NONE the size is that of the largest batch, so the step has to be padded there, too.
        Dispatchers of all ranks must hold the same keys.

        Args:
            dispatcher: of this rank.
            descriptor: this rank's batch before padding; one of 0 tokens where it has none, which
                goes wherever the others do, and counts as 1 token if none has more.
            use_cascade_attn: as for `CudagraphDispatcher.dispatch`.
            all_decode: likewise.
            highest_mode: likewise; on one rank, it holds for all.
        """
        if isinstance(highest_mode, str):
            highest_mode = CUDAGraphMode.parse_single(highest_mode, option="highest_mode")
        mode = _FULL if highest_mode is None else highest_mode
        ask: Callable[..., Route] = functools.partial(
            dispatcher.dispatch, use_cascade_attn=use_cascade_attn, all_decode=all_decode
        )
        route = None
        if descriptor.num_tokens:
            route = ask(descriptor, highest_mode=highest_mode)
            mode = route[0]
        else:  # nothing speaks against the graphs of decodes
            ask, descriptor = dispatcher.dispatch, descriptor._replace(num_reqs=0, uniform=True)
        agreed, num_tokens = self._agree(mode, descriptor.num_tokens)
        if route is not None and (agreed, num_tokens) == (mode, descriptor.num_tokens):
            return route
        return ask(_grown(descriptor, max(1, num_tokens), dispatcher), highest_mode=agreed)

    def check_same(self, settings: Mapping[str, Any]) -> None:
        """Refuse settings that differ between ranks, on all of them.

        Args:
            settings: by name, the same names on each rank; compared by how they print.

        Raises:
            ConfigError: one of them differs; tells the first and this rank's value.
        """
        sums = [zlib.crc32(repr(value).encode()) for value in settings.values()]
        least = self._least([*sums, *(-number for number in sums)])
        for (name, value), low, high in zip(
            settings.items(), least[: len(sums)], least[len(sums) :], strict=True
        ):
            if low != -high:
                raise ConfigError(
                    name,
                    value,
                    "differs between the ranks, whose steps would not fit each other",
                    "give every rank the same",
                )

    def everywhere(self, facts: Sequence[bool]) -> list[bool]:
        """For each fact, whether it holds on every rank."""
        return [bool(fact) for fact in self._least([int(fact) for fact in facts])]


def agreed_hindrance(
    name: str, own: str | None, store: Any, rank: int, num_ranks: int
) -> str | None:
    """Why the ranks of a group do without something, for all that ask; None if they have it.

    It may be asked where other ranks do not ask, and needs no exchange: for those that do not
    tell what they found it waits as long as the store does, and then nobody has it, whoever asks
    later included. What is decided once holds for as long as the store does.

    Args:
        name: of what is asked for.
        own: what speaks against it on this rank; None if nothing does.
        store: of the group.
        rank: this one, in the group.
        num_ranks: in the group.

    Raises:
        ConfigError: it was decided that all have it, and something speaks against it here by now.
    """
    decided = f"{name} decided"
    if not store.check([decided]):
        told = [f"{name} on {number}" for number in range(num_ranks)]
        store.set(told[rank], _NOTHING if own is None else f"{own} (rank {rank})")
        with contextlib.suppress(RuntimeError):  # which of its kinds is up to the store
            store.wait(told)
        missing = [str(number) for number, key in enumerate(told) if not store.check([key])]
        verdict = f"rank {', '.join(missing)} did not tell in time whether it can"
        if not missing:
            found = [store.get(key).decode() for key in told]
            verdict = next((reason for reason in found if reason != _NOTHING), _NOTHING)
        store.compare_set(decided, "", verdict)  # the first one holds
    verdict = store.get(decided).decode()
    if verdict != _NOTHING:
        return str(verdict)
    if own is not None:
        problem = f"cannot be had here any more, and other ranks have it: {own}"
        raise ConfigError(name, True, problem, "switch it off on every rank, or start all anew")
    return None


_NOTHING = "nothing"


def _grown(
    descriptor: BatchDescriptor, num_tokens: int, dispatcher: CudagraphDispatcher
) -> BatchDescriptor:
    """A batch with padding, so that it has as many tokens as that of another rank.

    Decodes are filled up by decodes, as far as there are graphs for so many requests.
    """
    query_len = dispatcher.uniform_decode_query_len
    is_uniform = descriptor.uniform and descriptor.num_tokens == descriptor.num_reqs * query_len
    num_reqs, remainder = divmod(num_tokens, query_len)
    if not is_uniform or remainder or num_reqs > dispatcher.max_num_seqs:
        return descriptor._replace(num_tokens=num_tokens, uniform=False)
    return descriptor._replace(num_tokens=num_tokens, num_reqs=num_reqs)
