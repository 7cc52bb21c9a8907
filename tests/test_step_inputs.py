"""A step's inputs lie padded at addresses that stay, each in memory of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_backend.batch_loader import BatchLoader
from compile_backend.errors import ConfigError
from compile_backend.runner_batch import Batch
from compile_backend.step_inputs import Dim, InputSpec, StepInputs

CPU = torch.device("cpu")
TOKENS, REQS, REQS_1 = Dim.NUM_TOKENS, Dim.NUM_REQS, Dim.NUM_REQS_PLUS_1
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)

quick = settings(max_examples=40, deadline=None, database=None)


def step_inputs(*specs: InputSpec, num_tokens: int = 8, num_reqs: int = 4) -> StepInputs:
    return StepInputs(specs, CPU, max_num_tokens=num_tokens, max_num_reqs=num_reqs)


def put(inputs: StepInputs, name: str, value: Any, size: int, padded: tuple[int, int]) -> None:
    """One input of a step in a layout of `padded` tokens and requests."""
    layout = inputs.layout(*padded)
    inputs.begin()
    inputs.put(layout.places[name], value, size)
    inputs.send(layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_no_rows_may_be_an_empty_list_however_long_they_are(dtype: torch.dtype) -> None:
    inputs = step_inputs(InputSpec("x", (TOKENS, 3), dtype))
    put(inputs, "x", [[1, 2, 3]] * 2, 2, (2, 1))
    for value in ([], (), torch.zeros(0, 3, dtype=dtype)):
        put(inputs, "x", value, 0, (2, 1))
    assert inputs.layout(2, 1).places["x"].device.tolist() == [[0, 0, 0]] * 2
    with pytest.raises(ValueError, match=r"has shape \(0,\), but this batch needs \(1, 3\)"):
        put(inputs, "x", [], 1, (2, 1))


# --- specs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "size"), [(TOKENS, 7), (REQS, 3), (REQS_1, 4)])
def test_sizes_of_a_batch(dim: Dim, size: int) -> None:
    spec = InputSpec("x", (2, dim, 5), torch.int32)
    assert (spec.axis, spec.dim) == (1, dim)
    assert spec.sizes(7, 3) == (2, size, 5)


@pytest.mark.parametrize("shape", [(), (3,), (TOKENS, REQS), (TOKENS, 2, TOKENS)])
def test_a_shape_changes_in_exactly_one_size(shape: tuple[int | Dim, ...]) -> None:
    with pytest.raises(ConfigError, match=r"input_spec\['x'\]\.shape.*NUM_REQS_PLUS_1"):
        InputSpec("x", shape, torch.int32)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": ""}, "input_spec.name='' names no argument"),
        ({"name": 3}, "input_spec.name=3 names no argument"),
        ({"shape": TOKENS}, r"input_spec\['x'\].shape=NUM_TOKENS is no shape; use a tuple"),
        ({"shape": (TOKENS, -1)}, "is no shape"),
        ({"shape": (TOKENS, 1.0)}, "is no shape"),
        ({"shape": (TOKENS, True)}, "is no shape"),
        ({"shape": "num_tokens"}, "is no shape"),
        ({"dtype": "int32"}, r"input_spec\['x'\].dtype='int32' is no dtype; use torch.int64"),
        ({"pad": "0"}, r"input_spec\['x'\].pad='0' is no number; use 0"),
        ({"indexes": "num_tokens"}, "indexes='num_tokens' is no Dim that numbers of torch.int32"),
        ({"indexes": TOKENS, "dtype": torch.float32}, "is no Dim that numbers of torch.float32"),
        ({"pad": 0.5}, "pad=0.5 is no integer of torch.int32; use a number that the dtype holds"),
        ({"pad": 1 << 31}, "pad=2147483648 is out of the range of torch.int32"),
    ],
)
def test_fields_of_another_kind_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        InputSpec(**{"name": "x", "shape": (TOKENS,), "dtype": torch.int32, **changes})


def test_shapes_may_be_lists_and_padding_a_fraction() -> None:
    shape: Any = [2, TOKENS]
    spec = InputSpec("x", shape, torch.float32, pad=0.5)
    assert spec == InputSpec("x", (2, TOKENS), torch.float32, pad=0.5)
    inputs = step_inputs(spec)
    put(inputs, "x", [[1.0], [2.0]], 1, (2, 1))
    assert inputs.layout(2, 1).tensors["x"].tolist() == [[1.0, 0.5], [2.0, 0.5]]


def test_names_are_unique() -> None:
    spec = InputSpec("x", (TOKENS,), torch.int32)
    with pytest.raises(ConfigError, match="holds a name twice"):
        step_inputs(spec, spec)


# --- one step ---------------------------------------------------------------------------------

AROUND: tuple[tuple[int, ...], ...] = ((), (3,), (1, 2))
specs = st.builds(
    lambda shape, dtype, pad: InputSpec("x", shape, dtype, pad),
    st.sampled_from(
        [(*before, dim, *after) for before in AROUND for dim in Dim for after in AROUND]
    ),
    st.sampled_from(DTYPES),
    st.sampled_from([0, 1]),
)


@quick
@given(drawn=st.lists(specs, min_size=1, max_size=4), data=st.data())
def test_every_input_holds_its_batch_and_its_padding(drawn: list[InputSpec], data: Any) -> None:
    """Two steps of random sizes, one after the other, whatever the types and the axes."""
    all_specs = [
        InputSpec(f"input_{i}", spec.shape, spec.dtype, spec.pad) for i, spec in enumerate(drawn)
    ]
    inputs = step_inputs(*all_specs)
    for seed in range(2):
        num_tokens, num_reqs = data.draw(st.integers(0, 8)), data.draw(st.integers(0, 4))
        padded = (data.draw(st.integers(num_tokens, 8)), data.draw(st.integers(num_reqs, 4)))
        layout = inputs.layout(*padded)
        values = {}
        inputs.begin()
        random = torch.Generator().manual_seed(seed)
        for spec in all_specs:
            sizes = spec.sizes(num_tokens, num_reqs)
            value = torch.randint(0, 2, sizes, generator=random).to(spec.dtype)
            values[spec.name] = value
            form = data.draw(st.sampled_from(["tensor", "array", "list"]))
            plain = value.float() if spec.dtype.is_floating_point else value.long()
            given_as = value if form == "tensor" else plain.numpy()
            if form == "list" and 0 not in sizes:
                given_as = given_as.tolist()
            size = spec.dim.of(num_tokens, num_reqs)
            inputs.put(layout.places[spec.name], given_as, size)
        inputs.send(layout)
        for spec in all_specs:
            held, size = layout.tensors[spec.name], spec.dim.of(num_tokens, num_reqs)
            assert held.shape == spec.sizes(*padded)
            assert held.dtype is spec.dtype
            own = held.narrow(spec.axis, 0, size)
            assert torch.equal(own.float(), values[spec.name].float())
            rest = held.narrow(spec.axis, size, held.shape[spec.axis] - size)
            assert torch.equal(rest.float(), torch.full_like(rest, spec.pad).float())


@quick
@given(drawn=st.lists(specs, min_size=1, max_size=4), num_tokens=st.integers(0, 8))
def test_inputs_do_not_overlap_and_start_their_own_storage(
    drawn: list[InputSpec], num_tokens: int
) -> None:
    all_specs = [InputSpec(f"input_{i}", spec.shape, spec.dtype) for i, spec in enumerate(drawn)]
    inputs = step_inputs(*all_specs)
    tensors = inputs.layout(num_tokens, 2).tensors
    end = inputs.layout(8, 4).tensors["input_0"].data_ptr()
    for spec in all_specs:
        tensor = tensors[spec.name]
        if not tensor.numel():
            continue
        assert tensor.is_contiguous()
        assert tensor.storage_offset() == 0
        assert tensor.untyped_storage().data_ptr() == tensor.data_ptr()
        assert tensor.data_ptr() >= end
        end = tensor.data_ptr() + tensor.numel() * tensor.element_size()


def test_memory_is_that_of_the_largest_batch() -> None:
    """Every input starts at a multiple of 256 bytes."""
    inputs = step_inputs(
        InputSpec("tokens", (TOKENS,), torch.int64),
        InputSpec("table", (REQS, 3), torch.int32),
        num_tokens=100,
        num_reqs=4,
    )
    assert inputs.num_bytes == 4 * 256 + 256


def test_layouts_share_the_memory_and_stay_where_they_are() -> None:
    inputs = step_inputs(InputSpec("x", (TOKENS,), torch.int32))
    small, large = inputs.layout(2, 1), inputs.layout(8, 4)
    assert inputs.layout(2, 1) is small
    assert small.tensors["x"].data_ptr() == large.tensors["x"].data_ptr()
    put(inputs, "x", [5, 6, 7], 3, (8, 4))
    assert small.tensors["x"].tolist() == [5, 6]
    assert large.tensors["x"].tolist() == [5, 6, 7, 0, 0, 0, 0, 0]


def test_a_layout_need_not_be_kept() -> None:
    inputs = step_inputs(InputSpec("x", (TOKENS,), torch.int32))
    passing = inputs.layout(3, 1, keep=False)
    kept = inputs.layout(3, 1)
    assert kept is not passing
    assert inputs.layout(3, 1, keep=False) is kept
    assert kept.tensors["x"].data_ptr() == passing.tensors["x"].data_ptr()


def test_a_batch_above_the_limits_has_no_layout() -> None:
    inputs = step_inputs(InputSpec("x", (TOKENS,), torch.int32))
    for sizes in ((9, 1), (1, 5)):
        with pytest.raises(AssertionError):
            inputs.layout(*sizes)


def test_arrays_are_the_memory_of_the_host() -> None:
    """Who makes metadata writes there, and it arrives with the rest."""
    inputs = step_inputs(
        InputSpec("x", (TOKENS,), torch.int32), InputSpec("half", (TOKENS,), torch.bfloat16)
    )
    layout = inputs.layout(4, 1)
    assert layout.arrays.keys() == {"x"}
    layout.arrays["x"][:] = [1, 2, 3, 4]
    inputs.send(layout)
    assert layout.tensors["x"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("value", "size"),
    [([1, 2], 3), ([[1, 2, 3]], 3), (1, 1), (torch.zeros(4), 3), (torch.tensor(1), 3)],
    ids=["short", "deep", "scalar", "long", "0-dim"],
)
def test_another_shape_is_refused_with_the_name(value: Any, size: int, dtype: torch.dtype) -> None:
    """None may spread over the rows in silence."""
    inputs = step_inputs(InputSpec("x", (TOKENS,), dtype))
    with pytest.raises(ValueError, match=r"input 'x' has shape .* needs \(\d,\).*NUM_TOKENS"):
        put(inputs, "x", value, size, (8, 1))


def test_more_rows_than_the_layout_has_are_refused() -> None:
    inputs = step_inputs(InputSpec("x", (TOKENS,), torch.int32))
    with pytest.raises(ValueError, match=r"input 'x' has shape \(5,\).*\(4,\)"):
        put(inputs, "x", range(5), 5, (4, 1))


def test_values_of_training_leave_no_trace() -> None:
    """Weights of embeddings that a caller computed may want gradients; the memory does not."""
    inputs = step_inputs(InputSpec("x", (TOKENS,), torch.float32))
    with torch.no_grad():
        put(inputs, "x", torch.ones(3, requires_grad=True), 3, (4, 1))
    held = inputs.layout(4, 1).tensors["x"]
    assert held.tolist() == [1, 1, 1, 0]
    assert not held.requires_grad


# --- on a GPU ---------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("is_captured", [False, True])
def test_steps_that_follow_each_other_do_not_mix_on_a_gpu(is_captured: bool) -> None:
    """The host is ahead of the device, whose queue is never empty; nothing overtakes."""
    cuda = torch.empty(0, device="cuda").device
    specs = (InputSpec("x", (TOKENS, 64), torch.int64), InputSpec("y", (REQS,), torch.int32))
    inputs = StepInputs(specs, cuda, max_num_tokens=4096, max_num_reqs=8)
    layout = inputs.layout(4096, 8)

    def step() -> list[torch.Tensor]:
        inputs.send(layout)
        return [layout.tensors["x"].sum(), layout.tensors["y"].sum()]

    results, graph = step(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    if is_captured:
        with torch.cuda.graph(graph):
            results = step()
    seen = []
    for number in range(12):
        torch.cuda._sleep(10_000_000)  # some milliseconds
        inputs.begin()
        inputs.put(layout.places["x"], np.full((4000, 64), number), 4000)
        inputs.put(layout.places["y"], torch.full((5,), -number, device=cuda), 5)
        if is_captured:
            graph.replay()
        else:
            results = step()
        seen.append([result.clone() for result in results])
    assert [[int(x), int(y)] for x, y in seen] == [
        [4000 * 64 * number, -5 * number] for number in range(12)
    ]
    assert layout.tensors["x"].untyped_storage().data_ptr() == layout.tensors["x"].data_ptr()


@pytest.mark.gpu
def test_the_copy_in_a_graph_is_waited_for_from_its_launch_on() -> None:
    """Not only from when the device comes to it: the host would write what is not copied yet."""
    cuda = torch.empty(0, device="cuda").device
    specs = (InputSpec("x", (TOKENS,), torch.int64),)
    inputs = StepInputs(specs, cuda, max_num_tokens=8, max_num_reqs=1)
    layout = inputs.layout(8, 1)
    inputs.send(layout)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inputs.send(layout)
    graph.replay()
    torch.cuda.synchronize()
    event = inputs._copied
    assert event is not None
    assert event.query()
    for number in range(3):
        inputs.begin()
        inputs.put(layout.places["x"], np.full(8, number), 8)
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        graph.replay()
        assert not event.query()
        inputs.begin()
        assert layout.tensors["x"].tolist() == [number] * 8


@pytest.mark.gpu
def test_what_a_refused_step_began_does_not_reach_the_next_one() -> None:
    """Its value on the device arrives late at the host's block, which is written again by then."""
    cuda = torch.empty(0, device="cuda").device
    inputs = StepInputs(
        (InputSpec("x", (REQS,), torch.int32),), cuda, max_num_tokens=8, max_num_reqs=8
    )
    layout = inputs.layout(8, 8)
    inputs.begin()
    torch.cuda._sleep(100_000_000)
    inputs.put(layout.places["x"], torch.full((8,), 5, dtype=torch.int32, device=cuda), 8)
    inputs.begin()  # of another step: the first was given up
    inputs.put(layout.places["x"], np.full(8, 7, np.int32), 8)
    inputs.send(layout)
    assert layout.tensors["x"].tolist() == [7] * 8


# --- batches ----------------------------------------------------------------------------------

IDS = InputSpec("ids", (1, TOKENS), torch.int64, pad=3)
LAST = InputSpec("last", (REQS,), torch.int64)


class CountingBuilder:
    """Attention metadata that is one running number per token."""

    max_query_len = 99
    input_spec = (InputSpec("numbers", (TOKENS,), torch.int32, pad=-1),)

    def __init__(self) -> None:
        self.refills: list[bool] = []

    def fill(self, batch: Any, query_lens: Any, host: Any, *, is_refill: bool) -> None:
        self.refills.append(is_refill)
        num_tokens = int(query_lens.sum())
        host["numbers"][:num_tokens] = batch + np.arange(num_tokens)
        host["numbers"][num_tokens:] = -1

    def capture_batch(self, query_lens: Any) -> Any:
        return 1000 * len(query_lens)


def loader(builder: Any = None) -> BatchLoader:
    extra = () if builder is None else builder.input_spec
    return BatchLoader(step_inputs(IDS, LAST, *extra), (IDS, LAST), builder)


def test_a_batch_brings_inputs_of_model_and_attention() -> None:
    held = loader(CountingBuilder())
    layout = held.inputs.layout(6, 3)
    lens = np.array([1, 3], np.int32)
    batch = Batch(query_lens=lens, inputs={"last": [0, 3], "ids": [[7, 8, 9, 10]]}, attention=5)
    held.load(layout, batch, lens, 4)
    ids, last = held.arguments(layout)
    assert ids.tolist() == [[7, 8, 9, 10, 3, 3]]
    assert last.tolist() == [0, 3, 0]
    assert layout.tensors["numbers"].tolist() == [5, 6, 7, 8, -1, -1]


def test_a_builder_is_told_whether_its_tensors_hold_its_last_batch() -> None:
    """Layouts share the memory, and a refused step may have written anything."""
    builder = CountingBuilder()
    held = loader(builder)
    small, large = held.inputs.layout(2, 1), held.inputs.layout(6, 3)
    lens = np.array([1], np.int32)
    batch = Batch(query_lens=lens, inputs={"last": [0], "ids": [[7]]}, attention=5)
    refused = Batch(query_lens=lens, inputs={"last": [0], "ids": [[7, 8]]}, attention=5)
    for layout in (small, small, large, small):
        held.load(layout, batch, lens, 1)
    with pytest.raises(ValueError, match="'ids' has shape"):
        held.load(large, refused, lens, 1)
    for layout in (small, small):
        held.load(layout, batch, lens, 1)
    assert builder.refills == [False, True, False, False, False, True]


@pytest.mark.parametrize("value", [[[0.5]], np.array([[0.5]]), torch.tensor([[0.5]])])
def test_fractions_are_no_integers(value: Any) -> None:
    held = loader()
    batch = Batch(query_lens=[1], inputs={"ids": value, "last": [0]})
    with pytest.raises(ValueError, match=r"'ids' has numbers of .*float"):
        held.load(held.inputs.layout(1, 1), batch, np.array([1], np.int32), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64, torch.uint64])
def test_integers_may_be_of_several_types(dtype: torch.dtype) -> None:
    held = step_inputs(InputSpec("x", (TOKENS,), dtype))
    place = held.layout(3, 1).places["x"]
    held.put(place, [np.uint64(2), 1, np.int8(0)], 3)
    assert place.host.tolist() == [2, 1, 0]
    if dtype.is_floating_point:
        return
    held.put(place, np.array([0, 1, 2], object), 3)
    assert place.host.tolist() == [0, 1, 2]
    for fraction in (0.5, 1.0):
        with pytest.raises(ValueError, match="has numbers of float64"):
            held.put(place, [np.uint64(2), 1, fraction], 3)


def test_integers_of_several_types_keep_all_their_bits() -> None:
    held = step_inputs(InputSpec("x", (TOKENS,), torch.uint64))
    place = held.layout(2, 1).places["x"]
    held.put(place, [np.uint64(2**64 - 1), 2**53 + 1], 2)
    assert place.host.tolist() == [2**64 - 1, 2**53 + 1]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array([2**31]), "holds 2147483648 to 2147483648, which torch.int32 does not"),
        ([-(2**31) - 1], "holds -2147483649"),
        ([2**64], "input 'x' holds 18446744073709551616 to .*, which integers of 64 bits do not"),
        (np.array([2**63], np.uint64), "which torch.int32 does not"),
        (["7"], "has values of <U1; give numbers"),
        (np.array(["2020-01-01"], "datetime64[D]"), "give numbers"),
        (np.array([1j]), "has values of complex128; give numbers"),
        (torch.tensor([2**31]), "holds 2147483648 to 2147483648, which torch.int32 does not"),
        (torch.tensor([2**63], dtype=torch.uint64), "which torch.int32 does not"),
        (torch.tensor([1j]), "has values of torch.complex64; give numbers"),
    ],
)
def test_no_number_comes_out_as_another(value: Any, message: str) -> None:
    inputs = step_inputs(InputSpec("x", (TOKENS,), torch.int32))
    held = BatchLoader(inputs, (InputSpec("x", (TOKENS,), torch.int32),), None)
    batch = Batch(query_lens=[1], inputs={"x": value})
    with pytest.raises(ValueError, match=message):
        held.load(inputs.layout(1, 1), batch, np.array([1], np.int32), 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize(
    "value",
    [np.array([1j]), ["7"], [None], np.array(["2020-01-01"], "datetime64[D]"), torch.tensor([1j])],
    ids=str,
)
def test_what_is_no_number_is_refused_by_its_name(value: Any, dtype: torch.dtype) -> None:
    held = step_inputs(InputSpec("x", (TOKENS,), dtype))
    with pytest.raises(ValueError, match=r"input 'x' .*give numbers"):
        held.put(held.layout(1, 1).places["x"], value, 1)


UNREADABLE = [
    ([[1], [1, 2]], "has rows of different lengths; fill the shorter ones up, with 0"),
    ([[1, 2], [3]], "has rows of different lengths; fill the shorter ones up, with 0"),
    (torch.empty(2, device="meta"), "is a tensor on the device meta, which holds no numbers"),
    ([torch.empty(1, device="meta")] * 2, "cannot be read: .*; give numbers that lie on the host"),
    (torch.ones(2).to_sparse(), r"of another kind \(torch.sparse_coo\); give a dense one"),
    (None, "give numbers"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize(("value", "message"), UNREADABLE, ids=range(len(UNREADABLE)))
def test_what_cannot_be_read_is_named(value: Any, message: str, dtype: torch.dtype) -> None:
    held = step_inputs(InputSpec("x", (TOKENS,), dtype))
    with pytest.raises(ValueError, match=f"^input 'x' .*{message}"):
        held.put(held.layout(2, 1).places["x"], value, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_arrays_may_have_any_order_of_bytes_and_rows(dtype: torch.dtype) -> None:
    held = step_inputs(InputSpec("x", (TOKENS,), dtype))
    for value in (np.array([2, 1])[::-1], np.array([1, 2], ">i4"), np.array([1, 0, 2])[::2]):
        layout = held.layout(2, 1)
        held.put(layout.places["x"], value, 2)
        assert layout.tensors["x"].tolist() == [1, 2]


def test_indices_may_be_tensors_of_any_integers() -> None:
    spec = InputSpec("x", (TOKENS,), torch.int32, indexes=TOKENS)
    held = step_inputs(spec)
    for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.int8):
        place = held.layout(2, 1).places["x"]
        held.put(place, torch.tensor([1, 0], dtype=dtype), 2, 2)
        assert place.host.tolist() == [1, 0]
        with pytest.raises(ValueError, match=r"holds 0 to 2, which are to be indices below"):
            held.put(place, torch.tensor([2, 0], dtype=dtype), 2, 2)


def test_the_ends_of_a_range_are_held() -> None:
    for dtype, kind in ((torch.int32, np.int32), (torch.int64, np.int64)):
        spec = InputSpec("x", (TOKENS,), dtype)
        inputs, limits = step_inputs(spec), np.iinfo(kind)
        ends = np.array([limits.min, limits.max], np.int64)
        batch = Batch(query_lens=[2], inputs={"x": ends})
        layout = inputs.layout(2, 1)
        BatchLoader(inputs, (spec,), None).load(layout, batch, np.array([2], np.int32), 2)
        assert layout.tensors["x"].tolist() == ends.tolist()


def test_padding_is_in_the_range_of_the_dtype() -> None:
    with pytest.raises(ConfigError, match=r"pad=1099511627776 is out of the range of torch.int32"):
        InputSpec("x", (TOKENS,), torch.int32, pad=2**40)


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [
        (torch.float32, 1e39),
        (torch.float16, -70000),
        (torch.bfloat16, 2**200),
        (torch.float8_e4m3fn, 500.0),
    ],
)
def test_padding_does_not_become_infinite(dtype: torch.dtype, pad: float) -> None:
    with pytest.raises(ConfigError, match=r"is out of the range of torch.*float"):
        InputSpec("x", (TOKENS,), dtype, pad=pad)
    for held in (float("-inf"), float("nan"), 0.1, 0):
        InputSpec("x", (TOKENS,), dtype, pad=held)


@pytest.mark.parametrize("names", [["ids"], ["ids", "last", "mask"], ["ids", "lsat"]], ids=str)
def test_inputs_are_those_that_were_declared(names: list[str]) -> None:
    held = loader()
    batch = Batch(query_lens=[1], inputs={name: [[0]] for name in names})
    with pytest.raises(ValueError, match=r"input_spec names \['ids', 'last'\]"):
        held.load(held.inputs.layout(1, 1), batch, np.array([1], np.int32), 1)


@given(lens=st.lists(st.integers(1, 3), min_size=1, max_size=4).filter(lambda all_: sum(all_) < 9))
@settings(deadline=None, database=None)
def test_a_batch_for_captures_fits(lens: list[int]) -> None:
    held = loader(CountingBuilder())
    layout = held.inputs.layout(8, 4)
    batch = held.capture_batch(sum(lens), len(lens))
    assert (len(batch.query_lens), batch.query_lens.sum()) == (len(lens), sum(lens))
    held.load(layout, batch, batch.query_lens, sum(lens))
    assert layout.tensors["ids"].tolist() == [[3] * 8]
    assert int(layout.tensors["numbers"][0]) == 1000 * len(lens)
