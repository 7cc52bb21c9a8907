"""The toy model of the tests: equal layers of linear + relu around what stands for attention.

Its outputs are those of the model run eagerly, and its counts of pieces, compiles, captures and
replays follow from the number of layers. The ops come from `Library.define`, as those of serving
engines do: fakes, no autograd, a string that names the layer.
"""

from __future__ import annotations

import copy
import gc
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

import compile_backend
from compile_backend.config import CUDAGraphMode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from compile_backend.stats import Report

# Every step that captures collects garbage; what was imported until now need not be looked at.
gc.freeze()

NONE = CUDAGraphMode.NONE
PIECEWISE = CUDAGraphMode.PIECEWISE
FULL = CUDAGraphMode.FULL
FULL_DECODE_ONLY = CUDAGraphMode.FULL_DECODE_ONLY
FULL_AND_PIECEWISE = CUDAGraphMode.FULL_AND_PIECEWISE
MODES = tuple(CUDAGraphMode)

VARIANTS = ("attn_out", "attn_new", "attn_pair", "attn_view", "attn_state")
"""Ops that stand for attention, by what they do with memory."""

SPLITTING_OPS = tuple(f"toy::{name}" for name in (*VARIANTS, "tally", "cache_write", "hook"))
WIDTH = 10

# --- ops --------------------------------------------------------------------------------------

calls: Counter[str] = Counter()
"""How often each op ran, by layer name, or by its own name where it was given none."""

hooks: list[Callable[[torch.Tensor], None]] = []
"""What `toy::hook` calls."""


def attention(x: torch.Tensor) -> torch.Tensor:
    """Causal mean of the rows: rows depend on earlier ones only, as in attention."""
    counts = torch.arange(1, x.shape[0] + 1, device=x.device, dtype=x.dtype)
    return x.cumsum(0) / counts.view(-1, *(1,) * (x.dim() - 1))


def _count(name: str, layer: str) -> None:
    calls[layer or name] += 1


def _attn_out(x: torch.Tensor, out: torch.Tensor, layer: str = "") -> None:
    _count("attn_out", layer)
    out.copy_(attention(x))


def _attn_new(x: torch.Tensor, layer: str = "") -> torch.Tensor:
    _count("attn_new", layer)
    return torch.empty_like(x).copy_(attention(x))


def _attn_pair(x: torch.Tensor, layer: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    _count("attn_pair", layer)
    mean = attention(x)
    return mean, mean.amax(-1)


def _attn_view(x: torch.Tensor, layer: str = "") -> torch.Tensor:
    _count("attn_view", layer)
    return x.view(x.shape[0], 2, -1)


def _attn_state(x: torch.Tensor, state: torch.Tensor, layer: str = "") -> torch.Tensor:
    _count("attn_state", layer)
    state.add_(x.sum(0))
    return x + state


def _tally(x: torch.Tensor, layer: str = "") -> torch.Tensor:
    _count("tally", layer)
    return x + 1


def _cache_write(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    kept = slots >= 0
    cache[slots[kept]] = x[kept]
    return x.new_empty(0)


def _hook(x: torch.Tensor) -> torch.Tensor:
    for hook in hooks:
        hook(x)
    return x.clone()


_OPS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "attn_out": (
        "(Tensor x, Tensor(a!) out, str layer='') -> ()",
        _attn_out,
        lambda x, out, layer="": None,
    ),
    "attn_new": (
        "(Tensor x, str layer='') -> Tensor",
        _attn_new,
        lambda x, layer="": torch.empty_like(x),
    ),
    "attn_pair": (
        "(Tensor x, str layer='') -> (Tensor, Tensor)",
        _attn_pair,
        lambda x, layer="": (torch.empty_like(x), x.new_empty(x.shape[:-1])),
    ),
    "attn_view": (
        "(Tensor(a) x, str layer='') -> Tensor(a)",
        _attn_view,
        lambda x, layer="": x.view(x.shape[0], 2, -1),
    ),
    "attn_state": (
        "(Tensor x, Tensor(a!) state, str layer='') -> Tensor",
        _attn_state,
        lambda x, state, layer="": torch.empty_like(x),
    ),
    "tally": (
        "(Tensor x, str layer='') -> Tensor",
        _tally,
        lambda x, layer="": torch.empty_like(x),
    ),
    "cache_write": (
        "(Tensor x, Tensor(a!) cache, Tensor slots) -> Tensor",
        _cache_write,
        lambda x, cache, slots: x.new_empty(0),
    ),
    "hook": ("(Tensor x) -> Tensor", _hook, torch.empty_like),
}

_library = torch.library.Library("toy", "DEF")
for _name, (_schema, _run, _fake) in _OPS.items():
    _library.define(_name + _schema)
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"toy::{_name}", _fake, lib=_library)


# --- models -----------------------------------------------------------------------------------


class ToyLayer(torch.nn.Module):
    """Linear, relu, and one op that stands for attention."""

    def __init__(self, variant: str, width: int, name: str) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.variant = variant
        self.name = name
        if variant == "attn_state":
            self.register_buffer("state", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.linear(x))
        if self.variant == "attn_out":
            out = torch.empty_like(hidden)
            torch.ops.toy.attn_out(hidden, out, self.name)
            return out
        if self.variant == "attn_pair":
            mean, largest = torch.ops.toy.attn_pair(hidden, self.name)
            return mean + largest.unsqueeze(-1)
        if self.variant == "attn_view":
            return torch.ops.toy.attn_view(hidden, self.name).flatten(1) + 1
        if self.variant == "attn_state":
            return torch.ops.toy.attn_state(hidden, self.state, self.name)
        return torch.ops.toy.attn_new(hidden, self.name)


class ToyModel(torch.nn.Module):
    """`num_layers` equal layers and a head: `num_layers + 1` pieces, `num_layers` sections.

    Args:
        variant: the op of every layer, or one for each layer.
        num_layers: equal layers.
        names: whether ops are told the name of their layer.
    """

    def __init__(
        self,
        variant: str | Sequence[str] = "attn_new",
        num_layers: int = 2,
        *,
        width: int = WIDTH,
        names: bool = False,
    ) -> None:
        super().__init__()
        variants = [variant] * num_layers if isinstance(variant, str) else list(variant)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = torch.nn.ModuleList(
                ToyLayer(each, width, f"layers.{i}" if names else "")
                for i, each in enumerate(variants)
            )
            self.head = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def toy_model(*args: Any, **kwargs: Any) -> ToyModel:
    """A `ToyModel` for inference."""
    return ToyModel(*args, **kwargs).eval().requires_grad_(False)


def rows(num_tokens: int, *shape: int, seed: int | None = None) -> torch.Tensor:
    """Random rows `[num_tokens, *shape]`, `[num_tokens, WIDTH]` by default."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, *(shape or (WIDTH,)), generator=generator)


# --- compiling and comparing ------------------------------------------------------------------


def toy_options(**options: Any) -> dict[str, Any]:
    """Options that split at the toy ops, declare them capturable and compile nothing."""
    return {
        "piece_compiler": "eager",
        "splitting_ops": SPLITTING_OPS,
        "attention_support": {"toy::*": "ALWAYS"},
        **options,
    }


def compiled(
    function: Any, *, dynamic: bool | None = None, fullgraph: bool = False, **options: Any
) -> Any:
    """`function` through the backend with `toy_options`."""
    return torch.compile(
        function,
        backend="cudagraph_modes",
        dynamic=dynamic,
        fullgraph=fullgraph,
        options=toy_options(**options),
    )


def dynamo_call(
    function: Any, *args: Any, dynamic: bool | None = None
) -> tuple[torch.fx.GraphModule, list[Any]]:
    """The graph that Dynamo makes of one call, and its inputs, as a backend gets them."""
    seen: list[tuple[torch.fx.GraphModule, list[Any]]] = []

    def keep(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        seen.append((graph, example_inputs))
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=keep, dynamic=dynamic, fullgraph=True)(*args)
    return seen[0]


def dynamo_graph(function: Any, *args: Any, dynamic: bool | None = None) -> torch.fx.GraphModule:
    """The graph that Dynamo makes of one call."""
    return dynamo_call(function, *args, dynamic=dynamic)[0]


class Twin:
    """A model and its eager twin: every call runs both and compares all that can be seen.

    Compared are results, arguments after the call, and the state of the models.

    Args:
        model: a module or a function.
        compile_with: makes the compiled one; `compiled` by default.
        options: for that.
    """

    def __init__(
        self, model: Any, *, compile_with: Callable[..., Any] = compiled, **options: Any
    ) -> None:
        self.eager = copy.deepcopy(model) if isinstance(model, torch.nn.Module) else model
        self.model = model
        self.compiled = compile_with(model, **options)

    def __call__(self, *args: Any) -> Any:
        """Run both on equal arguments; return the compiled one's results."""
        eager_args = _copied(args)
        with torch.no_grad():
            expected = self.eager(*eager_args)
            actual = self.compiled(*args)
        torch.testing.assert_close(actual, expected, equal_nan=True)
        torch.testing.assert_close(args, eager_args, equal_nan=True)
        if isinstance(self.model, torch.nn.Module):
            torch.testing.assert_close(
                dict(self.model.state_dict()), dict(self.eager.state_dict()), equal_nan=True
            )
        return actual

    @property
    def stats(self) -> Report:
        """The report of the compiled one."""
        return compile_backend.stats(self.compiled)


def _copied(args: Any) -> Any:
    """A copy of arguments, with the same sharing of memory and the same layouts."""
    return copy.deepcopy(args)


def counts(report: Report, counted: str) -> dict[CUDAGraphMode, int]:
    """One count of a report, by mode, without zeros."""
    found = {mode: report.total(counted, mode) for mode in (NONE, PIECEWISE, FULL)}
    return {mode: count for mode, count in found.items() if count}
