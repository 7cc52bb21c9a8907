"""Graphs of one rank of two: layers with sums over ranks, and what is asked of such graphs.

One process stands for rank 1; its group sends nothing.
"""

from __future__ import annotations

import contextlib
from collections import Counter

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch._dynamo.testing import CompileCounter
from torch.testing._internal.distributed.fake_pg import FakeStore
from toy import toy_options

from compile_backend.backend import stats
from compile_backend.torch_internals.dynamo import size_1_like_any_other

WIDTH = 8
RANK = 1


@contextlib.contextmanager
def one_of_two_ranks():
    """A default group of two ranks, and another one of the same."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=2)
    try:
        yield dist.new_group([0, 1])
    finally:
        dist.destroy_process_group()


def exchanged(graph):
    """How often each collective is called."""
    names = (getattr(node.target, "__name__", str(node.target)) for node in graph.nodes)
    kinds = ("all_reduce", "reduce_scatter", "all_gather")
    return Counter(kind for name in names for kind in kinds if name.startswith(kind))


def is_sound(graph):
    graph.lint()
    return all(node.op == "output" or "example_value" in node.meta for node in graph.nodes)


def rms(x, weight):
    """As transformers writes it."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def summed(x, group=None, op=dist.ReduceOp.SUM):
    """Over ranks, in place, as transformers has it."""
    dist.all_reduce(x, op, group)
    return x


def functional_sum(x):
    return dist._functional_collectives.all_reduce(x, "sum", "0")


def layers(x, w, weight, *, count=2, norm=rms, add=torch.add, reduce=summed, product=F.linear):
    """Layers of a product, a sum over ranks, the residual and a norm."""
    stream, normed = x, x
    for _ in range(count):
        stream = add(stream, reduce(product(normed, w)))
        normed = norm(stream, weight)
    return normed.relu()


def inputs_of(dtype=torch.float32, shape=(1, 5)):
    return (
        torch.ones(*shape, WIDTH, dtype=dtype),
        torch.eye(WIDTH, dtype=dtype),
        torch.ones(WIDTH, dtype=dtype),
    )


def call_with_rows(compiled, first, *others, counts):
    for count in counts:
        rows = torch.cat([first[:, :1]] * count, 1)
        torch._dynamo.mark_dynamic(rows, 1)
        compiled(rows, *others)


def assumes_nothing(model, *args, flags=("enable_sequence_parallelism",)):
    """Whether several numbers of rows take no more graphs than Dynamo makes by itself."""
    options = toy_options(pass_config=dict.fromkeys(flags, True))
    for counts, context in (
        ((5, 2, 3, 8), contextlib.nullcontext()),
        ((5, 1, 2, 3, 8), size_1_like_any_other()),
    ):
        by_itself = CompileCounter()
        with context:
            torch.compiler.reset()
            call_with_rows(torch.compile(model, backend=by_itself), *args, counts=counts)
            torch.compiler.reset()
            compiled = torch.compile(model, backend="cudagraph_modes", options=options)
            call_with_rows(compiled, *args, counts=counts)
        if stats(compiled).graphs != by_itself.frame_count:
            return False
    return True
