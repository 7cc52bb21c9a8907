"""Attention that writes 8-bit floats: forms that match, near misses, real models, kernels.

What is fused rounds where the plain ops did, so results are equal, bit for bit: on the CPU, where
attention is followed by plain ops, and on a GPU, where Triton's kernels quantise what they hold.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import fp8_models
import pytest
import torch
from paged_toy import VOCABULARY, PagedToy, compiled, make_loop
from ragged import CPU, FP8, Paged, Ragged, attention_step, bits
from test_triton_attention import GPU_LENGTHS, Case, make_batch, needs_interpreter
from torch._inductor.scheduler import BaseSchedulerNode
from toy import MODES, dynamo_call

import compile_backend
from compile_backend import plan
from compile_backend.attention.backend import AttentionBackend
from compile_backend.attention.builder import AttentionBatch
from compile_backend.attention.flash_attn3 import FlashAttention3
from compile_backend.attention.fp8_output import quantise
from compile_backend.attention.huggingface import paged_model
from compile_backend.attention.ops import attention, attention_fp8
from compile_backend.attention.registry import BACKENDS
from compile_backend.attention.sdpa import SdpaAttention
from compile_backend.attention.triton_attention import FP8_CAPABILITY, TritonAttention
from compile_backend.attention.triton_launch import attend_with_triton
from compile_backend.backend import CudagraphModesBackend
from compile_backend.config import CUDAGraphMode
from compile_backend.context import set_forward_context
from compile_backend.explain import explain
from passes.attn_fp8 import AttnQuantFusionPass

SIZE = 32
"""Of a token's output: 4 heads of 8."""

pytestmark = [
    pytest.mark.usefixtures("one_core", "without_gradients"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]


# --- one attention ----------------------------------------------------------------------------


def cut(x):
    return x.clamp(-448, 448).to(FP8)


def divided(x, scale):
    return cut(x.float() / scale)


def attended(query, key, value, layer="0"):
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    attention(query, key, value, output, layer)
    return output


def rows_of(output):
    """As Hugging Face's layers and linear layers bring them to two dimensions."""
    output = output.unsqueeze(0).reshape(1, output.shape[0], -1).contiguous()
    return output.reshape(-1, output.shape[-1])


def _flat_buffer(q, k, v, s):
    output = torch.empty((q.shape[0], SIZE), dtype=q.dtype, device=q.device)
    attention(q, k, v, output.view(-1, 4, 8), "0")
    return divided(output, s)


def _made_like(make):
    def form(q, k, v, s):
        output = make(q.contiguous())
        attention(q, k, v, output, "0")
        return divided(output.flatten(1), s)

    return form


def _by_name(q, k, v, s):
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    torch.ops.cudagraph_modes.attention(q, k, v, output=output, layer_name="0")
    return divided(output, s)


FORMS: dict[str, Any] = {
    "as transformers has it": lambda q, k, v, s: divided(rows_of(attended(q, k, v)), s),
    "as it is": lambda q, k, v, s: divided(attended(q, k, v), s),
    "multiplied": lambda q, k, v, s: cut(rows_of(attended(q, k, v)).float() * s),
    "one element": lambda q, k, v, s: cut(attended(q, k, v).flatten(1) / s.view(1)),
    "a buffer of rows": _flat_buffer,
    "like the queries": _made_like(torch.empty_like),
    "new from the queries": _made_like(lambda q: q.new_empty(q.shape)),
    "arguments by name": _by_name,
    "a scale made before": lambda q, k, v, s: divided((s := s * 2, attended(q, k, v))[1], s),
    "its result in another shape": lambda q, k, v, s: (
        divided(attended(q, k, v), s).view(-1, SIZE).float()
    ),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def case_of(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Ragged:
    return Ragged(query_lens=(3, 1), contexts=(5, 2), dtype=dtype, **changes)


def rewritten(
    function: Any, dtype: torch.dtype = torch.bfloat16, *, dynamic: bool = True
) -> tuple[int, torch.fx.Graph]:
    """Places changed; what is computed before and after is equal, bit for bit."""
    paged = Paged(case_of(dtype), SdpaAttention)
    args = (paged.query, *paged.new, torch.tensor(0.004))
    with set_forward_context(paged.step(in_graph=False)):
        graph_module, inputs = dynamo_call(function, *args, dynamic=dynamic)
        expected = outputs_of(graph_module, inputs)
        changed = AttnQuantFusionPass(attention, attention_fp8)(graph_module.graph)
        graph_module.graph.lint()
        graph_module.recompile()
        for one, other in zip(outputs_of(graph_module, inputs), expected, strict=True):
            assert one.dtype is other.dtype
            assert one.shape == other.shape
            assert one.stride() == other.stride()
            assert torch.equal(bits(one), bits(other))
    return changed, graph_module.graph


def outputs_of(graph_module: torch.fx.GraphModule, inputs: Any) -> Any:
    given = [
        each.clone() if isinstance(each, torch.Tensor) else int(each)  # may be written
        for each in inputs
    ]
    return graph_module(*given)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_fused_and_gives_what_it_gave(form: str) -> None:
    changed, graph = rewritten(FORMS[form])
    assert changed == 1
    (op,) = (node for node in graph.nodes if node.target is attention_fp8)
    assert op.args[5:] == ("0", form == "multiplied")
    assert op.args[3].meta["example_value"].dtype is FP8
    assert not graph.find_nodes(op="call_function", target=attention)
    assert not graph.find_nodes(op="call_method", target="clamp")
    for node in graph.nodes:
        assert node.op == "output" or "example_value" in node.meta


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_dtypes_and_sizes(dtype: torch.dtype, dynamic: bool) -> None:
    assert rewritten(FORMS["as transformers has it"], dtype, dynamic=dynamic)[0] == 1


def test_every_attention_of_a_chain_is_fused() -> None:
    def layers(q, k, v, s):
        for _ in range(3):
            q = q + divided(rows_of(attended(q, k, v)), s).to(q.dtype).view(q.shape)
        return q

    assert rewritten(layers)[0] == 3


def test_views_of_what_is_replaced_go_by_the_new_memory() -> None:
    """Splitting reads who shares memory with whom off the values."""
    _, graph = rewritten(lambda q, k, v, s: divided(rows_of(attended(q, k, v)), s).view(-1, 8))
    buffer = graph.find_nodes(op="call_function", target=torch.empty)[0]
    (view,) = (node for node in graph.nodes if node.target == "view")
    memory = [n.meta["example_value"].untyped_storage()._cdata for n in (buffer, view)]
    assert memory[0] == memory[1]


# --- near misses ------------------------------------------------------------------------------


def _then(change):
    """The output changed by one call before it is quantised."""
    return lambda q, k, v, s: divided(change(attended(q, k, v)), s)


def _written_after(q, k, v, s):
    output = attended(q, k, v)
    output.mul_(2)
    return divided(output, s)


def _written_in_part(q, k, v, s):
    output = attended(q, k, v)
    output.view(-1, SIZE)[0] = 0
    return divided(output, s)


def _filled_before(q, k, v, s):
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    output.zero_()
    attention(q, k, v, output, "0")
    return divided(output, s)


def _attended_twice(q, k, v, s):
    output = attended(q, k, v)
    attention(q + 1, k, v, output, "0")
    return divided(output, s)


def _quantised_before(q, k, v, s):
    output = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    quantised = divided(output, s)
    attention(q, k, v, output, "0")
    return quantised


def _read_before(q, k, v, s):
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    quantised = divided(output, s)
    attention(q, k, v, output, "0")
    return torch.zeros_like(quantised, dtype=q.dtype)  # the buffer holds anything


def _queries_as_output(q, k, v, s):
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    attention(output, k, v, output, "0")
    return torch.zeros_like(divided(output, s), dtype=q.dtype)


def _wider_buffer(q, k, v, s):
    output = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    attention(q, k, v, output, "0")
    return divided(output, s)


def _part_of_a_buffer(q, k, v, s):
    output = torch.empty((2, *q.shape), dtype=q.dtype, device=q.device)[0]
    attention(q, k, v, output, "0")
    return divided(output, s)


def _buffer_of_the_caller(q, k, v, s):
    output = q * 0
    attention(q, k, v, output, "0")
    return divided(output, s)


def _scale_written(q, k, v, s):
    s = s + 0
    output = attended(q, k, v)
    s.mul_(2)
    return divided(output, s)


def _result_written(q, k, v, s):
    return divided(attended(q, k, v), s).zero_()


def _token_scale(x):
    return (x.abs().amax(-1, keepdim=True).float() / 448).clamp(min=1e-12)


OTHER_QUANTISATIONS = {
    "per token": lambda x, s: divided(x, _token_scale(x)),
    "per tensor": lambda x, s: divided(x, x.abs().amax().float() / 448),
    "a scale for each head": lambda x, s: divided(x, s.expand(4, 1).contiguous()),
    "a scale of 16 bits": lambda x, s: divided(x, s.to(torch.bfloat16)),
    "a scale of 64 bits": lambda x, s: divided(x, s.double()),
    "a number for a scale": lambda x, s: divided(x, 0.5),
    "another 8-bit dtype": lambda x, s: (
        (x.float() / s).clamp(-448, 448).to(torch.float8_e5m2).float()
    ),
    "another limit": lambda x, s: (x.float() / s).clamp(-240, 240).to(FP8),
    "no limit": lambda x, s: (x.float() / s).to(FP8).float().nan_to_num(),
    "divided in 16 bits": lambda x, s: cut(x / s),
    "a scale made of the output": lambda x, s: divided(x, s * x.abs().amax().float()),
    "a scale made too late": lambda x, s: divided(x, s * 2),
    "what is scaled is read": lambda x, s: (cut(y := x.float() / s), y),
    "what is cut is read": lambda x, s: ((y := (x.float() / s).clamp(-448, 448)).to(FP8), y),
}
NEAR_MISSES: dict[str, Any] = {
    **{
        name: (lambda q, k, v, s, form=form: form(attended(q, k, v), s))
        for name, form in OTHER_QUANTISATIONS.items()
    },
    "a cast in between": _then(lambda x: x.to(torch.float16)),
    "a sum in between": _then(lambda x: x + 1),
    "another order": _then(lambda x: x.transpose(0, 1)),
    "another order, copied": _then(lambda x: x.transpose(0, 1).contiguous()),
    "a part": _then(lambda x: x[:, 1:]),
    "repeated": _then(lambda x: x.repeat(2, 1, 1)),
    "bits": lambda q, k, v, s: divided(attended(q, k, v).view(torch.uint8).view(q.dtype), s),
    "read by somebody": lambda q, k, v, s: (divided(o := attended(q, k, v), s), o.relu()),
    "a view is read": lambda q, k, v, s: (divided(o := attended(q, k, v), s), o.view(-1) * 2),
    "returned": lambda q, k, v, s: (divided(o := attended(q, k, v), s), o),
    "quantised in two ways": lambda q, k, v, s: (
        divided(o := attended(q, k, v), s),
        divided(o, _token_scale(o)),
    ),
    "written behind": _written_after,
    "written in part": _written_in_part,
    "written before": _filled_before,
    "attended twice": _attended_twice,
    "quantised before": _quantised_before,
    "read before": _read_before,
    "queries and output": _queries_as_output,
    "a wider buffer": _wider_buffer,
    "a part of a buffer": _part_of_a_buffer,
    "a buffer of other contents": _buffer_of_the_caller,
    "a scale that is written": _scale_written,
    "a result that is written": _result_written,
    "not quantised": lambda q, k, v, s: attended(q, k, v) * s,
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses_are_left_alone(case: str) -> None:
    changed, graph = rewritten(NEAR_MISSES[case], dynamic=False)
    assert changed == 0
    assert not graph.find_nodes(op="call_function", target=attention_fp8)


def test_what_gradients_flow_through_is_left_alone() -> None:
    paged = Paged(case_of(), SdpaAttention)
    seen = []

    def backend(graph_module, _):
        seen.append(AttnQuantFusionPass(attention, attention_fp8)(graph_module.graph))
        return graph_module.forward

    query = paged.query.requires_grad_()
    with torch.enable_grad(), set_forward_context(paged.step(in_graph=False)):
        torch.compile(
            lambda *args: divided(attended(*args[:3]), args[3]).float(), backend=backend
        )(query, *paged.new, torch.tensor(0.004))
    assert seen == [0]


# --- models of transformers -------------------------------------------------------------------

ALL_FUSIONS = {"enable_noop": True, "enable_fusion": True, "enable_attn_fusion": True}
ATTENTION_ONLY = {"enable_attn_fusion": True}
NUM_LAYERS = fp8_models.NUM_LAYERS


@pytest.mark.parametrize("name", fp8_models.ARCHITECTURES)
def test_models_are_fused_at_every_layer(name: str) -> None:
    """Split or whole, with other fusions or without. Dynamo traces once for all of these."""
    all_options: tuple[dict[str, Any], ...] = (
        {"pass_config": ATTENTION_ONLY},
        {"pass_config": ALL_FUSIONS, "splitting_ops": ["cudagraph_modes::attention"]},
        {"pass_config": ATTENTION_ONLY, "splitting_ops": [], "cudagraph_mode": "FULL"},
    )
    model = fp8_models.fp8_model(name, "static")
    paged = paged_model(model, num_blocks=4, block_size=4, max_model_len=8, backend="sdpa")
    backends = [CudagraphModesBackend() for _ in all_options]
    logits: list[torch.Tensor] = []

    def compile_each(graph_module: torch.fx.GraphModule, example_inputs: Any) -> Any:
        calls = [graph_module.forward]
        for backend, options in zip(backends, all_options, strict=True):
            copied = torch.fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
            calls.append(
                backend(copied, example_inputs, options={"piece_compiler": "eager", **options})
            )

        def run_all(*args: Any) -> Any:
            results = [call(*args) for call in calls]
            logits.extend(result[0] for result in results)
            return results[0]

        return run_all

    run = torch.compile(paged.module, backend=compile_each, fullgraph=True)
    batch = AttentionBatch(seq_lens=[3, 2], block_table=[[2, 0], [1, 3]])
    ids, positions = torch.tensor([[5, 9, 2, 7, 1]]), torch.tensor([[0, 1, 2, 0, 1]])
    for each in (ids, positions):
        torch._dynamo.mark_dynamic(each, 1)
    with set_forward_context(attention_step(paged.builder, batch, [3, 2])):
        run(ids, positions, torch.tensor([2, 4]))
    assert len(logits) == 1 + len(all_options)
    for other in logits[1:]:
        assert torch.equal(other, logits[0])
    reports = [backend.stats(run) for backend in backends]
    assert [report.passes["attn_fp8"] for report in reports] == [NUM_LAYERS] * 3
    assert [report.eager_sections for report in reports] == [NUM_LAYERS, NUM_LAYERS, 0]
    assert [report.mode_resolved for report in reports][2] == ("FULL",)
    assert reports[1].passes["rms_norm_fp8"] > 0


def test_a_fusion_that_matched_nothing_says_so_and_which_scales_it_takes() -> None:
    def per_token(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = attended(query, key, value).flatten(1)
        return divided(output, _token_scale(output))

    paged = Paged(case_of(), SdpaAttention)
    options = {"pass_config": ATTENTION_ONLY, "piece_compiler": "eager"}
    with set_forward_context(paged.step(in_graph=False)):
        (graph,) = explain(per_token, paged.query, *paged.new, options=options).graphs
    assert graph.passes["attn_fp8"] == 0
    (note,) = [note for note in graph.notes if "changed nothing" in note]
    assert note.startswith(
        "enable_attn_fusion was asked for and changed nothing in this graph; it takes static "
        "scales only, one value for all tokens: leave it out for scales per token, else write "
    )
    assert note.endswith("see docs/how-it-works.md, Quantisations that fuse")


# --- the runner -------------------------------------------------------------------------------


class Fp8Toy(PagedToy):
    """A model whose linear layers behind attention are given 8-bit floats."""

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        x = self.embed(tokens) + self.places(positions)
        for index, name in enumerate(self.layer_names):
            quantised = divided(rows_of(attended(*self.split(index, x), name)), self.scale)
            x = x + torch.relu(self.out[index](quantised.to(x.dtype)))
        return x[last] @ self.embed.weight.t()


WORK = (
    [(0, 5), (1, 3)],  # prompts
    [(0, 3), (1, 1)],  # a chunk beside a decode
    [(0, 1), (1, 1)],
    [(1, 1), (0, 1)],
    [(0, 1)],
)


def logits_of(model: Fp8Toy, called: Any, mode: str, backend: str) -> tuple[Any, list[Any]]:
    """What ran, and the logits of each step."""
    loop = make_loop(
        mode,
        model,
        called=called,
        backend=backend,
        sizes=(1, 2, 4, 8),
        limits=(4, 16),
        device=str(model.embed.weight.device),
    )
    for request in range(2):
        loop.add([(5 * request + 3 * place) % VOCABULARY for place in range(12)])
    logits = []
    for work in WORK:
        logits.append(loop.runner.run(loop.batch(work)).clone())
        for request, count in work:
            loop.done[request] += count
    return loop.ran(), logits


GPU_BACKENDS = {"triton": TritonAttention, "flash_attn_3": FlashAttention3}


@pytest.mark.parametrize(
    "backend", ["sdpa", *(pytest.param(name, marks=pytest.mark.gpu) for name in GPU_BACKENDS)]
)
def test_every_mode_gives_what_it_gave(backend: str) -> None:
    """Captured or between graphs, with padding or without; one Dynamo trace for all modes."""
    device = torch.device("cpu" if backend == "sdpa" else "cuda")
    missing = GPU_BACKENDS[backend].missing(device) if backend in GPU_BACKENDS else None
    if missing is not None:
        pytest.skip(missing)
    model = Fp8Toy().to(device, torch.bfloat16)
    model.register_buffer("scale", torch.tensor(0.004, device=device))
    plain = compiled(model)
    fused = compiled(model, pass_config=ATTENTION_ONLY)
    whole = compiled(model, pass_config=ATTENTION_ONLY, splitting_ops=[])
    for mode in MODES:
        ran, expected = logits_of(model, plain, mode.name, backend)
        for called in (fused, whole) if mode is CUDAGraphMode.FULL else (fused,):
            also_ran, actual = logits_of(model, called, mode.name, backend)
            assert also_ran == ran
            assert all(map(torch.equal, actual, expected)), mode
    for called, num_sections in ((fused, 2), (whole, 0)):
        report = compile_backend.stats(called)
        assert report.passes["attn_fp8"] == 2 * report.graphs
        assert report.eager_sections == num_sections * report.graphs


@pytest.mark.slow
def test_inductor_parts_the_graph_at_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor parts graphs for GPUs only, so it is told that its nodes run on one."""
    monkeypatch.setattr(BaseSchedulerNode, "is_gpu", lambda self: True)
    monkeypatch.setattr(plan, "are_made_on", lambda device_type: True)
    model = Fp8Toy().to(torch.bfloat16)
    model.register_buffer("scale", torch.tensor(0.004))
    options = {"piece_compiler": "inductor", "use_inductor_graph_partition": True}
    plain = compiled(model, **options)
    fused = compiled(model, pass_config=ATTENTION_ONLY, **options)
    with torch.compiler.config.patch(cache_key_tag="partitions on the CPU"):
        ran, expected = logits_of(model, plain, "PIECEWISE", "sdpa")
        also_ran, actual = logits_of(model, fused, "PIECEWISE", "sdpa")
    assert also_ran == ran
    assert all(map(torch.equal, actual, expected))
    for called, num_fused in ((plain, 0), (fused, 2)):
        report = compile_backend.stats(called)
        assert report.partitions == 3 * report.graphs
        assert report.passes.get("attn_fp8", 0) == num_fused * report.graphs


@pytest.mark.slow
def test_inductor_compiles_the_op_as_part_of_a_whole_graph() -> None:
    """What is around it Inductor may round otherwise, so it is alone but for a cast."""
    paged = Paged(case_of(), SdpaAttention)
    args = (paged.query, *paged.new, torch.tensor(0.004))
    whole = torch.compile(
        lambda *args: FORMS["as transformers has it"](*args).float(),
        backend="cudagraph_modes",
        options={"pass_config": ATTENTION_ONLY, "splitting_ops": [], "cudagraph_mode": "FULL"},
    )
    with set_forward_context(paged.step(in_graph=False)):
        expected = FORMS["as transformers has it"](*args).float()
        for _ in range(2):
            assert torch.equal(whole(*args), expected)
    report = compile_backend.stats(whole)
    assert report.passes["attn_fp8"] == 1
    assert report.eager_sections == 0


# --- backends ---------------------------------------------------------------------------------


@pytest.mark.parametrize("multiplies", [False, True])
@pytest.mark.parametrize("in_graph", [False, True])
def test_the_reference_quantises_what_it_attended(in_graph: bool, multiplies: bool) -> None:
    paged = Paged(case_of(num_padding_tokens=3, num_padding_reqs=1), SdpaAttention)
    step = paged.step(in_graph=in_graph)
    (layer,) = step.layers.values()
    wide = paged.run(step)
    scale = torch.tensor([[4.0 if multiplies else 0.25]])
    output = torch.empty(wide.shape, dtype=FP8)
    with set_forward_context(step):
        attention_fp8(paged.query, *paged.new, output, scale, layer.name, multiplies)
    expected = (wide.float() * 4).clamp(-448, 448).to(FP8)
    num_real = sum(paged.case.query_lens)
    assert torch.equal(bits(output)[:num_real], bits(expected)[:num_real])


def test_only_triton_has_kernels_that_write_8_bit_floats() -> None:
    own = {
        row.name
        for row in BACKENDS
        if row.module and row.load().forward_fp8 is not AttentionBackend.forward_fp8
    }
    assert own == {"triton"}


LENGTHS = ((1, 70), (2, 0), (0, 0))


def check_kernels(case: Case, device: torch.device, kept_as: torch.dtype, *, multiplies: bool):
    """Quantised by the kernels as by torch, bit for bit; some numbers are out of range."""
    batch = make_batch(case, device)
    query, key, value = batch.qkv
    plan = batch.backend.prepare(batch.metadata)
    if case.num_splits is not None:
        plan = replace(plan, num_splits=case.num_splits)
    wide = torch.zeros_like(query)
    batch.backend.forward(query, key, value, wide, batch.cache, batch.metadata, plan)
    scale = torch.tensor(501.3 if multiplies else 0.0021, device=device)
    expected = torch.empty(wide.shape, dtype=FP8, device=device)
    quantise(wide, expected, scale, multiplies=multiplies)
    for quantises in (True, False):  # by the program that attends, and by a kernel behind it
        output = torch.zeros(wide.shape, dtype=kept_as, device=device)
        for _ in range(2):  # the second time as a launch that is repeated
            attend_with_triton(
                query,
                output,
                batch.cache,
                batch.metadata,
                batch.backend.spec,
                replace(plan, quantises=quantises),
                scale,
                multiplies=multiplies,
            )
        assert torch.equal(bits(output.to(FP8)), bits(expected))
    assert (expected.float().abs() == 448).any()
    assert (expected.float().abs() < 448).any()
    return batch, expected


@needs_interpreter
@pytest.mark.parametrize(
    ("dtype", "multiplies", "num_splits"),
    [
        (torch.float32, False, 1),
        (torch.float16, True, 1),
        (torch.float16, False, 4),
        (torch.float32, True, 4),
    ],
    ids=str,
)
def test_kernels_in_the_interpreter(dtype: torch.dtype, multiplies: bool, num_splits: int) -> None:
    """What it would round to 8 bits is kept as float32, and rounded by torch."""
    case = Case(
        lengths=LENGTHS,
        num_heads=2,
        num_kv_heads=1,
        num_splits=num_splits,
        num_padding_tokens=2,
        dtype=dtype,
    )
    batch, quantised = check_kernels(case, CPU, torch.float32, multiplies=multiplies)
    reference = SdpaAttention(batch.backend.spec, batch.backend.cache, CPU)
    output = torch.zeros(quantised.shape, dtype=FP8)
    scale = torch.tensor(501.3 if multiplies else 0.0021)
    arguments = (*batch.qkv, output, scale, batch.cache, batch.metadata, None)
    reference.forward_fp8(*arguments, multiplies=multiplies)
    # Rounded from nearly equal numbers, they are equal or next to each other.
    torch.testing.assert_close(quantised.float(), output.float(), rtol=0.126, atol=2**-9)


@needs_interpreter
@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize(
    ("num_heads", "head_size"), [(6, 24), (48, 128), (1, 8)], ids=["masked", "two blocks", "small"]
)
def test_heads_of_all_sizes_are_quantised(num_heads: int, head_size: int, num_splits: int) -> None:
    """Also into a buffer that others share: what lies between its heads is left as it is."""
    case = Case(
        lengths=((3, 0), (0, 0)),
        num_heads=num_heads,
        num_kv_heads=1,
        head_size=head_size,
        num_splits=num_splits,
        num_padding_tokens=2,
        dtype=torch.float16,
    )
    batch, expected = check_kernels(case, CPU, torch.float32, multiplies=False)
    query = batch.qkv[0]
    plan = batch.backend.prepare(batch.metadata)
    plan = replace(plan, num_splits=num_splits, quantises=False)
    shared = torch.full((query.shape[0], num_heads, head_size + 4), 7.0)
    output, between = shared.split((head_size, 4), 2)
    scale = torch.tensor(0.0021)
    cache, metadata, spec = batch.cache, batch.metadata, batch.backend.spec
    attend_with_triton(query, output, cache, metadata, spec, plan, scale)
    assert torch.equal(bits(output[:3].to(FP8)), bits(expected[:3]))
    assert (output[3:] == 7).all()
    assert (between == 7).all()


@needs_interpreter
def test_in_the_interpreter_the_backend_leaves_8_bits_to_torch() -> None:
    batch = make_batch(Case(lengths=LENGTHS), CPU)
    plan = batch.backend.prepare(batch.metadata)
    wide, output = torch.zeros_like(batch.qkv[0]), torch.zeros(batch.qkv[0].shape).to(FP8)
    batch.backend.forward(*batch.qkv, wide, batch.cache, batch.metadata, plan)
    scale = torch.tensor(0.01)
    arguments = (*batch.qkv, output, scale, batch.cache, batch.metadata, plan)
    batch.backend.forward_fp8(*arguments, multiplies=False)
    assert torch.equal(bits(output), bits(divided(wide, scale)))


@pytest.mark.gpu
@pytest.mark.parametrize("multiplies", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("lengths", GPU_LENGTHS.values(), ids=GPU_LENGTHS)
def test_kernels_on_a_gpu(
    lengths: tuple[tuple[int, int], ...], dtype: torch.dtype, multiplies: bool
) -> None:
    if torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("no 8-bit floats of this kind")
    case = Case(
        lengths=lengths,
        num_heads=16,
        num_kv_heads=8,
        head_size=128,
        block_size=16,
        num_padding_tokens=5,
        dtype=dtype,
    )
    check_kernels(case, torch.device("cuda"), FP8, multiplies=multiplies)
