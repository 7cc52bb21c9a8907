"""Norms and gates that give 8-bit floats: every form that matches, every near miss, real models.

On the CPU the fused ops are their references, which do what the plain ops did in the same order:
there results are equal, bit for bit. Where Inductor compiles what is around them, numbers may be
rounded elsewhere; how far is derived where it is used.
"""

from __future__ import annotations

from typing import Any

import fp8_models
import pytest
import torch
from toy import MODES, counts, dynamo_call, toy_options

import compile_backend
from compile_backend.bench.fp8_linears import KINDS
from compile_backend.config import CUDAGraphMode
from compile_backend.explain import explain
from passes.fp8_quantisation import PER_TENSOR, PER_TOKEN, STATIC, quantisations
from passes.noop import NoopPass
from passes.rms_norm_fp8 import RMSNormFp8Pass
from passes.silu_mul_fp8 import SiluMulFp8Pass

FP8 = torch.float8_e4m3fn
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
SIZE = 64


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch.compiler.reset()
    with torch.no_grad():
        yield


# --- what is quantised, as transformers writes it ---------------------------------------------


def norm(x, weight):
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + 1e-6)
    return weight * x.to(dtype)


def gated(gate, up):
    return torch.nn.functional.silu(gate) * up


# --- quantisations, in every form that matches ------------------------------------------------


def cut(x):
    return x.clamp(-448, 448).to(FP8)


def per_token(x):
    return (x.abs().amax(-1, keepdim=True).float() / 448).clamp(min=1e-12)


STATIC_FORMS = {
    "divided": lambda x, s: cut(x.float() / s),
    "multiplied by the inverse": lambda x, s: cut(x.float() * s),
    "inverse first": lambda x, s: cut(s * x.float()),
    "to float32": lambda x, s: cut(x.to(torch.float32) / s),
    "to float32 by name": lambda x, s: cut(x.to(dtype=torch.float32) / s),
    "torch.div": lambda x, s: cut(torch.div(x.float(), s)),
    "limits by name": lambda x, s: (x.float() / s).clamp(min=-448.0, max=448.0).to(FP8),
    "torch.clamp": lambda x, s: torch.clamp(x.float() / s, -448.0, 448.0).to(FP8),
    "limits of finfo": lambda x, s: (
        (x.float() / s).clamp(torch.finfo(FP8).min, torch.finfo(FP8).max).to(FP8)
    ),
    "torch.clip": lambda x, s: torch.clip(x.float() / s, -448, 448).to(FP8),
    "one limit behind the other": lambda x, s: (
        (x.float() / s).clamp(min=-448).clamp(max=448).to(FP8)
    ),
    "the upper limit first": lambda x, s: (x.float() / s).clamp(max=448).clamp(-448).to(FP8),
    "limits by functions of their own": lambda x, s: torch.clamp_max(
        torch.clamp_min(x.float() / s, -448), 448
    ).to(FP8),
    "one element": lambda x, s: cut(x.float() / s.view(1)),
    "one element widens by itself": lambda x, s: cut(x / s.view(1)),
}


def _dynamic(x, scale, *, multiplies=False):
    return cut(x.float() * scale.reciprocal() if multiplies else x.float() / scale), scale


TOKEN_FORMS = {
    "limit behind": lambda x: _dynamic(x, per_token(x)),
    "limit before": lambda x: _dynamic(
        x, x.abs().amax(-1, keepdim=True).float().clamp(min=1e-5) / 448
    ),
    "limit before, of no power of 2": lambda x: _dynamic(
        x, x.abs().amax(-1, keepdim=True).float().clamp(min=0.7) / 448.0
    ),
    "no limit": lambda x: _dynamic(x, x.abs().amax(-1, keepdim=True).float() / 448),
    "dim by name": lambda x: _dynamic(x, x.abs().amax(dim=-1, keepdim=True).float() / 448),
    "dim as a tuple": lambda x: _dynamic(x, x.abs().amax((-1,), keepdim=True).float() / 448),
    "dim from the front": lambda x: _dynamic(
        x, x.abs().amax(x.dim() - 1, keepdim=True).float() / 448
    ),
    "wide before the largest": lambda x: _dynamic(
        x, (x.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
    ),
    "functions of torch": lambda x: _dynamic(
        x, torch.clamp(torch.amax(torch.abs(x), -1, keepdim=True).float() / 448, min=1e-12)
    ),
    "values of max": lambda x: _dynamic(
        x, (x.abs().max(-1, keepdim=True).values.float() / 448).clamp(min=1e-12)
    ),
    "first of torch.max": lambda x: _dynamic(
        x, torch.max(x.abs(), dim=-1, keepdim=True)[0].float() / 448
    ),
    "values of max, wide": lambda x: _dynamic(x, x.float().abs().max(-1, True)[0] / 448),
    "values of max, as a column": lambda x: _dynamic(
        x, (x.abs().max(-1).values.unsqueeze(-1).float() / 448).clamp_min(1e-12)
    ),
    "amax, as a column": lambda x: _dynamic(x, x.abs().amax(dim=-1).unsqueeze(-1).float() / 448),
    "by the reciprocal": lambda x: _dynamic(x, per_token(x), multiplies=True),
    "1 by the scale": lambda x: (
        cut(x.float() * (1.0 / (scale := per_token(x)))),
        scale,
    ),
}
TENSOR_FORMS = {
    "amax": lambda x: _dynamic(x, (x.abs().amax().float() / 448).clamp(min=1e-12)),
    "max": lambda x: _dynamic(x, (x.abs().max().float() / 448).clamp(min=1e-12)),
    "by the reciprocal": lambda x: _dynamic(
        x, (x.abs().max().float() / 448).clamp(min=1e-12), multiplies=True
    ),
    "no limit": lambda x: _dynamic(x, x.float().abs().max() / 448),
}
FORMS = {
    **{f"static, {name}": (form, STATIC) for name, form in STATIC_FORMS.items()},
    **{f"token, {name}": (lambda x, s, f=f: f(x), PER_TOKEN) for name, f in TOKEN_FORMS.items()},
    **{
        f"tensor, {name}": (lambda x, s, f=f: f(x), PER_TENSOR) for name, f in TENSOR_FORMS.items()
    },
}

# What is quantised, by which pass it is fused, and whether a sum comes back.
PRODUCERS: dict[str, Any] = {
    "norm": (lambda a, b, w: (norm(a, w), a), RMSNormFp8Pass),
    "norm of a sum": (lambda a, b, w: (norm(h := a + b, w), h), RMSNormFp8Pass),
    "gate": (lambda a, b, w: (gated(a, b), a), SiluMulFp8Pass),
}


def inputs_of(dtype, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(*shape, SIZE, generator=generator) for _ in range(2))
    weight = 1 + 0.3 * torch.randn(SIZE, generator=generator)
    return (a * 3).to(dtype), b.to(dtype), weight.to(dtype), torch.tensor(0.0123)


def rewritten(function, graph_pass, *args, dynamic=True):
    """Places changed; what is computed before and after is equal, bit for bit."""
    graph_module, inputs = dynamo_call(function, *args, dynamic=dynamic)
    inputs = [int(value) if isinstance(value, torch.SymInt) else value for value in inputs]
    expected = graph_module(*inputs)
    changed = graph_pass(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
    actual = graph_module(*inputs)
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype is other.dtype
        assert one.shape == other.shape
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0, equal_nan=True)
    for node in graph_module.graph.nodes:
        assert node.op == "output" or "example_value" in node.meta
    return changed, graph_module.graph


def fused_ops(graph):
    return [node for node in graph.nodes if "_fp8" in str(node.target)]


@pytest.mark.parametrize("producer", PRODUCERS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_fused_and_gives_what_it_gave(producer, form):
    make, graph_pass = PRODUCERS[producer]
    quantise, _ = FORMS[form]

    def layer(a, b, weight, scale):
        made, kept = make(a, b, weight)
        return quantise(made, scale), kept * 2

    changed, graph = rewritten(layer, graph_pass(), *inputs_of(torch.bfloat16, 5))
    assert changed == 1
    (op,) = fused_ops(graph)
    if producer == "norm of a sum":
        assert op.args[1] is not None
        assert not [n for n in graph.nodes if getattr(n.target, "__name__", "") == "add"]


@pytest.mark.parametrize("producer", PRODUCERS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", [STATIC, PER_TOKEN, PER_TENSOR])
@pytest.mark.parametrize("dynamic", [False, True])
def test_dtypes_and_shapes(producer, dtype, kind, dynamic):
    """With the rows of several requests made one dimension, as linear layers do."""
    make, graph_pass = PRODUCERS[producer]
    quantise = next(form for form, of_kind in FORMS.values() if of_kind == kind)

    def layer(a, b, weight, scale):
        made, kept = make(a, b, weight)
        return quantise(made.reshape(-1, SIZE), scale), quantise(made.view(-1, SIZE), scale), kept

    changed, graph = rewritten(layer, graph_pass(), *inputs_of(dtype, 2, 5), dynamic=dynamic)
    assert changed == 1
    assert len(fused_ops(graph)) == 1


OTHER_WAYS = ("max", "amax, as", "clip", "behind the other", "upper", "functions of")


@pytest.mark.parametrize("form", [form for form in FORMS if any(w in form for w in OTHER_WAYS)])
def test_other_ways_give_the_same_for_zeros_infinities_and_no_numbers(form):
    def layer(a, b, weight, scale):
        return FORMS[form][0](gated(a, b), scale)

    a, b, weight, scale = inputs_of(torch.float32, 6)
    for row, value in enumerate((0.0, -0.0, float("inf"), float("-inf"), float("nan"))):
        a[row, 3] = b[row, 3] = value
    a[5] = 0
    assert rewritten(layer, SiluMulFp8Pass(), a, b, weight, scale)[0] == 1


def test_layers_with_scales_of_their_own_are_fused_together():
    def layers(a, b, weight, scale):
        made = norm(a, weight)
        other = scale * 2
        return cut(made.float() / scale), cut(made.float() / other), cut(made.float() / scale)

    # The second scale is made behind the norm, but before anything is quantised.
    changed, graph = rewritten(layers, RMSNormFp8Pass(), *inputs_of(torch.bfloat16, 5))
    assert changed == 1
    (op,) = fused_ops(graph)
    assert len(op.args[3]) == 2


def test_a_chain_of_layers_is_fused_whole():
    def layers(a, b, weight, scale):
        h = a + b
        for _ in range(3):
            h = h + cut(norm(h, weight).float() / scale).to(h.dtype)
        return h

    changed, _ = rewritten(layers, RMSNormFp8Pass(), *inputs_of(torch.bfloat16, 5))
    assert changed == 3


def test_views_of_what_is_replaced_go_by_the_new_memory():
    """Splitting reads who shares memory with whom off the values."""

    def layer(a, b, weight, scale):
        h = a + b
        made = norm(h, weight)
        one, scale_of_one = _dynamic(made, per_token(made))
        two, _ = _dynamic(made, per_token(made))
        return one.view(-1), two.view(-1), scale_of_one.view(-1), h.view(-1)

    _, graph = rewritten(layer, RMSNormFp8Pass(), *inputs_of(torch.bfloat16, 5))
    for node in graph.nodes:
        if node.target == "view":
            memory = [
                n.meta["example_value"].untyped_storage()._cdata for n in (node, node.args[0])
            ]
            assert memory[0] == memory[1]


def test_calls_that_do_nothing_in_between_are_in_the_way_until_they_are_left_out():
    def layer(a, b, weight, scale):
        return cut(norm(a, weight)[:, :].contiguous().float() / scale)

    graph_module, _ = dynamo_call(layer, *inputs_of(torch.bfloat16, 5))
    assert RMSNormFp8Pass()(graph_module.graph) == 0
    assert NoopPass()(graph_module.graph) == 2
    assert RMSNormFp8Pass()(graph_module.graph) == 1


# --- near misses ------------------------------------------------------------------------------

NOT_QUANTISED = {
    "another limit": lambda x, s: (x.float() / s).clamp(-240, 240).to(FP8),
    "half a limit": lambda x, s: (x.float() / s).clamp(max=448).to(FP8),
    "no limit": lambda x, s: (x.float() / s).to(FP8),
    "a third limit": lambda x, s: (
        (x.float() / s).clamp(min=-448).clamp(max=448).clamp(max=100).to(FP8)
    ),
    "a tighter limit behind": lambda x, s: (x.float() / s).clamp(-448, 448).clamp(max=9).to(FP8),
    "limits that cross": lambda x, s: (x.float() / s).clamp(min=448).clamp(max=-448).to(FP8),
    "only lower limits": lambda x, s: (x.float() / s).clamp(min=-448).clamp(min=448).to(FP8),
    "a limit that is a tensor": lambda x, s: (
        (x.float() / s).clamp(min=-448).clamp(max=s * 448).to(FP8)
    ),
    "another 8-bit dtype": lambda x, s: (x.float() / s).clamp(-448, 448).to(torch.float8_e5m2),
    "divided in 16 bits": lambda x, s: cut(x / s),
    "a scale for each column": lambda x, s: cut(x.float() / (s + torch.ones(SIZE))),
    "a number for a scale": lambda x, s: cut(x.float() / 0.5),
    "upside down": lambda x, s: cut(s / x.float()),
    "a scale of 16 bits": lambda x, s: cut(x.float() / s.to(torch.bfloat16)),
    "floored": lambda x, s: cut(torch.div(x.float(), s, rounding_mode="floor")),
    "rounded first": lambda x, s: cut((x.float() / s).round()),
}
NOT_DYNAMIC = {
    "largest of each column": lambda x, s: _dynamic(
        x, x.abs().amax(0, keepdim=True).float() / 448
    ),
    "largest of each column, by max": lambda x, s: _dynamic(
        x, x.abs().max(0, keepdim=True).values.float() / 448
    ),
    "where the largest is": lambda x, s: _dynamic(
        x, x.abs().max(-1, keepdim=True).indices.float() / 448
    ),
    "smallest": lambda x, s: _dynamic(x, x.abs().min(-1, keepdim=True).values.float() / 448),
    "largest, not magnitude": lambda x, s: _dynamic(x, x.amax(-1, keepdim=True).float() / 448),
    "another constant": lambda x, s: _dynamic(x, x.abs().amax(-1, keepdim=True).float() / 240),
    "times the inverse": lambda x, s: _dynamic(
        x, x.abs().amax(-1, keepdim=True).float() * (1 / 448)
    ),
    "divided in 16 bits": lambda x, s: _dynamic(x, (x.abs().amax(-1, keepdim=True) / 448).float()),
    "a largest scale": lambda x, s: _dynamic(
        x, (x.abs().amax(-1, keepdim=True).float() / 448).clamp(1e-12, 1.0)
    ),
    "largest of something else": lambda x, s: _dynamic(x, per_token(x * 2)),
    "mean": lambda x, s: _dynamic(x, x.abs().float().mean(-1, keepdim=True) / 448),
}


@pytest.mark.parametrize("form", [*NOT_QUANTISED, *NOT_DYNAMIC])
@pytest.mark.parametrize("producer", ["norm", "gate"])
def test_other_quantisations_are_left_alone(producer, form):
    make, graph_pass = PRODUCERS[producer]
    quantise = NOT_QUANTISED.get(form) or NOT_DYNAMIC[form]

    def layer(a, b, weight, scale):
        made, kept = make(a, b, weight)
        return quantise(made, scale), kept * 2

    changed, _ = rewritten(layer, graph_pass(), *inputs_of(torch.bfloat16, 5))
    assert changed == 0


def _norm_in_16_bits(x, weight):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _norm_of(change):
    """A norm that differs in one place."""

    def made(a, b, weight):
        x = a.to(torch.float32)
        return change(a, x, weight)

    return made


NOT_NORMS = {
    "in 16 bits": lambda a, b, w: _norm_in_16_bits(a, w),
    "another power": _norm_of(
        lambda a, x, w: w * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6)).to(a.dtype)
    ),
    "mean of columns": _norm_of(
        lambda a, x, w: w * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6)).to(a.dtype)
    ),
    "sum": _norm_of(
        lambda a, x, w: w * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)).to(a.dtype)
    ),
    "no epsilon": _norm_of(
        lambda a, x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))).to(a.dtype)
    ),
    "root": _norm_of(
        lambda a, x, w: w * (x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(a.dtype)
    ),
    "of something else": _norm_of(
        lambda a, x, w: (
            w * (x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-6)).to(a.dtype)
        )
    ),
    "weight before the rounding": _norm_of(
        lambda a, x, w: (w.float() * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))).to(
            a.dtype
        )
    ),
    "a weight more by 1": _norm_of(
        lambda a, x, w: (
            (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) * (1.0 + w.float())
        ).to(a.dtype)
    ),
    "a wide weight": _norm_of(
        lambda a, x, w: (
            w.float() * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(a.dtype)
        )
    ),
    "a weight for each row": lambda a, b, w: norm(a, w[:5, None]),
    "layer norm": lambda a, b, w: torch.nn.functional.layer_norm(a, (SIZE,), w),
    "gate of another kind": lambda a, b, w: torch.nn.functional.gelu(a) * b,
    "sum of the gate": lambda a, b, w: torch.nn.functional.silu(a) + b,
    "gate in place": lambda a, b, w: torch.nn.functional.silu(a.clone(), inplace=True) * b,
    "gate of one row for all": lambda a, b, w: gated(a, b[:1]),
    "gate of two dtypes": lambda a, b, w: gated(a, b.float()),
}


@pytest.mark.parametrize("form", NOT_NORMS)
def test_other_values_are_left_alone(form):
    def layer(a, b, weight, scale):
        return cut(NOT_NORMS[form](a, b, weight).float() / scale)

    for graph_pass in (RMSNormFp8Pass(), SiluMulFp8Pass()):
        changed, _ = rewritten(layer, graph_pass, *inputs_of(torch.bfloat16, 5), dynamic=False)
        assert changed == 0


def _quantised(x, scale):
    return cut(x.float() / scale)


READ_BY_OTHERS = {
    "the value": lambda a, b, w, s: (_quantised(n := norm(a, w), s), n),
    "a view of the value": lambda a, b, w, s: (_quantised(n := norm(a, w), s), n.view(-1).relu()),
    "the value, by another kind": lambda a, b, w, s: (
        _quantised(n := norm(a, w), s),
        _dynamic(n, per_token(n)),
    ),
    "what is scaled": lambda a, b, w, s: (cut(y := norm(a, w).float() / s), y),
    "where the largest is": lambda a, b, w, s: (
        _dynamic(n := gated(a, b), (found := n.abs().max(-1, keepdim=True)).values.float() / 448),
        found.indices,
    ),
    "what is cut on one side": lambda a, b, w, s: (
        (low := (gated(a, b).float() / s).clamp(min=-448)).clamp(max=448).to(FP8),
        low,
    ),
    "the gated": lambda a, b, w, s: (_quantised(n := gated(a, b), s), n),
    "the gate": lambda a, b, w, s: (_quantised((g := torch.nn.functional.silu(a)) * b, s), g),
}
WRITTEN = {
    "what is normed, in between": lambda a, b, w, s: (
        n := norm(h := a + b, w),
        h.add_(1),
        _quantised(n, s),
    )[1:],
    "the value": lambda a, b, w, s: _quantised(norm(a, w).mul_(2), s),
    "the scale": lambda a, b, w, s: (n := norm(a, w), s.add_(1), _quantised(n, s))[1:],
    "the gate's input": lambda a, b, w, s: (
        n := gated(h := a + 1, b),
        h.zero_(),
        _quantised(n, s),
    )[1:],
}
LAID_OUT_OTHERWISE = {
    "rows side by side": lambda a, b, w, s: _quantised(norm(a.t().contiguous().t(), w), s),
    "the gate": lambda a, b, w, s: _quantised(
        gated(a.t().contiguous().t(), b.t().contiguous().t()), s
    ),
}
LEFT_ALONE = {**READ_BY_OTHERS, **WRITTEN, **LAID_OUT_OTHERWISE}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_others_read_or_write_is_left_alone(case):
    def layer(a, b, weight, scale):
        scale = scale + 0
        return LEFT_ALONE[case](a, b, weight, scale)

    for graph_pass in (RMSNormFp8Pass(), SiluMulFp8Pass()):
        assert rewritten(layer, graph_pass, *inputs_of(torch.bfloat16, 5))[0] == 0


def test_a_scale_that_is_made_too_late_is_left_alone():
    def layers(a, b, weight, scale):
        one = cut(norm(a, weight).float() / scale)
        return one, cut(norm(b, weight).float() / one.float().abs().amax())

    assert rewritten(layers, RMSNormFp8Pass(), *inputs_of(torch.bfloat16, 5))[0] == 2

    def one_norm(a, b, weight, scale):
        made = norm(a, weight)
        one = cut(made.float() / scale)
        return one, cut(made.float() / one.float().abs().amax())

    assert rewritten(one_norm, RMSNormFp8Pass(), *inputs_of(torch.bfloat16, 5))[0] == 0


def test_what_gradients_flow_through_is_left_alone():
    a, b, weight, scale = inputs_of(torch.bfloat16, 5)
    weight.requires_grad_()

    def layer(a, b, weight, scale):
        return _quantised(norm(a, weight), scale)

    with torch.enable_grad():
        seen = []
        torch.compile(
            layer,
            backend=lambda graph, _: seen.append(RMSNormFp8Pass()(graph.graph)) or graph.forward,
        )(a, b, weight, scale)
    assert seen == [0]


def test_kinds_are_told_apart():
    for form, kind in FORMS.values():
        torch.compiler.reset()
        graph_module, _ = dynamo_call(
            lambda a, b, w, s, f=form: f(a.relu(), s), *inputs_of(torch.bfloat16, 5)
        )
        (found,) = [one for each in quantisations(graph_module.graph).values() for one in each]
        assert found.kind == kind


# --- through the backend ----------------------------------------------------------------------

FUSION = {"pass_config": {"enable_noop": True, "enable_fusion": True}}


def layers_around_attention(a, b, weight, scale):
    """Two norms of sums, in front of a cut and behind it, and a gate."""
    h = a + b
    x = cut(norm(h, weight).float() / scale).to(h.dtype)
    h = h + torch.ops.toy.attn_new(x)
    x = cut(norm(h, weight).float() / scale).to(h.dtype)
    return h + cut(gated(x, b).float() / scale).to(h.dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_every_mode_fuses_and_splits(mode, dynamic):
    """Hard case F1: the counts are those of the graph, whatever is split out and captured."""
    compiled = torch.compile(
        layers_around_attention,
        backend="cudagraph_modes",
        dynamic=dynamic,
        options=toy_options(cudagraph_mode=mode, cudagraph_capture_sizes=(5, 6), **FUSION),
    )
    for seed in range(4):
        for num_tokens in (5, 6):
            args = inputs_of(torch.bfloat16, num_tokens, seed=seed)
            torch.testing.assert_close(
                compiled(*args), layers_around_attention(*args), rtol=0, atol=0
            )
    report = compile_backend.stats(compiled)
    num_graphs = report.graphs
    assert report.passes["rms_norm_fp8"] == 2 * num_graphs
    assert report.passes["silu_mul_fp8"] == num_graphs
    assert report.eager_sections == num_graphs
    assert bool(counts(report, "replays")) == (mode.mixed_mode() is not CUDAGraphMode.NONE)


def test_a_fusion_that_matched_nothing_says_so():
    options = toy_options(pass_config={"enable_fusion": True})
    (graph,) = explain(
        lambda x: torch.ops.toy.attn_new(x).relu(), torch.ones(3, 10), options=options
    ).graphs
    (note,) = [note for note in graph.notes if "changed nothing" in note]
    assert note.startswith("enable_fusion was asked for and changed nothing in this graph; write ")
    assert note.endswith("see docs/how-it-works.md, Quantisations that fuse")
    assert (graph.passes["rms_norm_fp8"], graph.passes["silu_mul_fp8"]) == (0, 0)


def test_inductor_compiles_pieces_with_the_ops():
    """Around the ops are only sums of two numbers, which Inductor rounds as eager does."""
    compiled = torch.compile(
        layers_around_attention,
        backend="cudagraph_modes",
        dynamic=True,
        options=toy_options(piece_compiler="inductor", **FUSION),
    )
    for num_tokens in (5, 6, 6):
        args = inputs_of(torch.bfloat16, num_tokens)
        torch.testing.assert_close(compiled(*args), layers_around_attention(*args), rtol=0, atol=0)
    assert compile_backend.stats(compiled).unstorable == 0


# --- models of transformers -------------------------------------------------------------------

# Norms and gates for each layer: those in front of attention and of the dense layers. The experts
# of Mixtral are no linear layers, so nothing behind its second norm is quantised.
PER_LAYER = {"llama": (2, 1), "qwen3": (2, 1), "mixtral": (1, 0)}

pytestmark = [
    pytest.mark.usefixtures("one_core"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]


def logits_of(model, num_requests, num_tokens):
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(0, 96, (num_requests, num_tokens), generator=generator)
    return model(ids, use_cache=False).logits


@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("llama", kind) for kind in KINDS), ("qwen3", "static"), ("mixtral", "token")],
)
def test_models_are_fused_at_every_layer(name, kind):
    model = fp8_models.fp8_model(name, kind)
    expected = [logits_of(model, 2, num_tokens) for num_tokens in (7, 5)]
    compiled = torch.compile(
        model,
        backend="cudagraph_modes",
        dynamic=True,
        options={"piece_compiler": "eager", **FUSION},
    )
    actual = [logits_of(compiled, 2, num_tokens) for num_tokens in (7, 5)]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    report = compile_backend.stats(compiled)
    norms, gates = PER_LAYER[name]
    assert report.graphs == 1
    assert report.passes["rms_norm_fp8"] == norms * fp8_models.NUM_LAYERS
    assert report.passes["silu_mul_fp8"] == gates * fp8_models.NUM_LAYERS
    assert report.passes["noop"] > 0
    assert report.eager_sections == fp8_models.NUM_LAYERS


@pytest.mark.slow
def test_a_model_compiled_by_inductor_is_as_near_as_its_quantisation():
    """Inductor keeps float32 where eager rounds to bfloat16.

    So some numbers fall to the other side of a rounding to 8 bits. All of them did, the results
    would differ as two quantisations of one model do; so the distance to eager stays below that
    of the quantised model to the one that is not quantised.
    """
    model = fp8_models.fp8_model("llama", "token")
    expected = logits_of(model, 2, 7).float()
    quantisation = (expected - logits_of(fp8_models.wide_model("llama"), 2, 7).float()).norm()
    compiled = torch.compile(model, backend="cudagraph_modes", dynamic=True, options=dict(FUSION))
    for _ in range(3):
        distance = (logits_of(compiled, 2, 7).float() - expected).norm()
        assert distance < quantisation
    assert compile_backend.stats(compiled).passes["rms_norm_fp8"] == 2 * fp8_models.NUM_LAYERS
