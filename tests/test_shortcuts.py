"""The C part does what the general code does, or declines: memory and errors are the same."""

from __future__ import annotations

import gc
import operator
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_backend import shortcuts
from compile_backend.attention.builder import AttentionBatch, AttentionMetadataBuilder
from compile_backend.attention.kv_cache import LayerCache
from compile_backend.attention.layer import AttentionLayer
from compile_backend.attention.registry import make_backend
from compile_backend.attention.spec import AttentionSpec, CacheFormat
from compile_backend.batch_loader import BatchLoader
from compile_backend.runner_batch import Batch
from compile_backend.step_inputs import Dim, InputSpec, StepInputs

quick = settings(max_examples=150, deadline=None, database=None)
CPU = torch.device("cpu")
TOKENS, REQS = Dim.NUM_TOKENS, Dim.NUM_REQS

integer_types = st.sampled_from([np.int32, np.int64, np.int16, np.uint8, np.float32])


def test_it_is_built() -> None:
    assert shortcuts.are_built()


def both_ways(run: Any) -> tuple[Any, Any]:
    """What `run` returns, or the error that it raises, with the C part and without."""
    results = []
    for is_fast in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not is_fast:
                patch.setattr(shortcuts, "put_inputs", lambda *_: 0)
                patch.setattr(shortcuts, "fill_attention", lambda *_: False)
            try:
                results.append(run())
            except ValueError as error:
                results.append(str(error))
    return results[0], results[1]


def strided(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same numbers, a step of two elements apart."""
    wide = np.repeat(array, 2, axis=-1)
    return wide[..., ::2]


@st.composite
def arrays(draw: Any, shape: tuple[int, ...], low: int = -3, high: int = 9) -> Any:
    """An array of almost this shape, with almost these numbers."""
    if draw(st.integers(0, 9)) == 0:
        shape = tuple(max(0, size + draw(st.integers(-1, 1))) for size in shape)
    dtype = draw(integer_types)
    seed = draw(st.integers(0, 2**32 - 1))
    numbers = np.random.default_rng(seed).integers(low, high, shape)
    if np.issubdtype(dtype, np.unsignedinteger):
        numbers = np.abs(numbers)
    array = numbers.astype(dtype)
    form = draw(st.sampled_from(["array", "strided", "list", "array"]))
    if form == "strided" and array.ndim:
        return strided(array)
    return array.tolist() if form == "list" else array


# --- inputs of a step -------------------------------------------------------------------------


@quick
@given(data=st.data())
def test_inputs_are_put_as_without_it(data: Any) -> None:
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64, torch.float32, torch.bool]))
    before = data.draw(st.sampled_from([(), (1,), (2,), (1, 1)]))
    after = data.draw(st.sampled_from([(), (3,)]))
    pad = data.draw(st.sampled_from([0, 1]))
    is_index = dtype in (torch.int32, torch.int64) and data.draw(st.booleans())
    spec = InputSpec("x", (*before, TOKENS, *after), dtype, pad, TOKENS if is_index else None)
    size, padded = sorted(data.draw(st.lists(st.integers(0, 6), min_size=2, max_size=2)))
    value = data.draw(arrays((*before, size, *after)))

    def run() -> list[Any]:
        inputs = StepInputs((spec,), CPU, max_num_tokens=6, max_num_reqs=1)
        layout = inputs.layout(padded, 1)
        batch = Batch(query_lens=[size], inputs={"x": value})
        BatchLoader(inputs, (spec,), None).write(layout, batch, np.array([size]), size)
        held: list[Any] = layout.tensors["x"].tolist()
        return held

    fast, general = both_ways(run)
    assert fast == general


@quick
@given(lens=st.data(), query_len=st.integers(1, 4))
def test_tokens_are_counted(lens: Any, query_len: int) -> None:
    value = lens.draw(arrays((lens.draw(st.integers(0, 4)),), 0, 4))
    counted = shortcuts.count_tokens(value, query_len)
    array = np.asarray(value)
    is_plain = isinstance(value, np.ndarray) and array.dtype in (np.int32, np.int64)
    if not is_plain or not array.size or array.min() < 1:
        assert counted is None
    else:
        assert counted == (array.sum(), bool((array == query_len).all()))


def test_no_length_overflows() -> None:
    assert shortcuts.count_tokens(np.array([2**31]), 1) is None
    large = np.full(4, 2**31 - 1, np.int32)
    assert shortcuts.count_tokens(large, 1) == (4 * (2**31 - 1), False)


@quick
@given(data=st.data())
def test_decodes_are_told(data: Any) -> None:
    num_reqs = data.draw(st.integers(0, 4))
    seqs = data.draw(arrays((num_reqs,), 0, 4))
    queries = np.array(
        data.draw(st.lists(st.integers(1, 3), min_size=num_reqs, max_size=num_reqs)), np.int32
    )
    told = shortcuts.all_longer(seqs, queries)
    if told is not None:
        assert told is bool((np.asarray(seqs) > queries).all())
    is_plain = isinstance(seqs, np.ndarray) and seqs.dtype in (np.int32, np.int64)
    assert (told is None) is not (is_plain and len(seqs) == num_reqs)


# --- attention --------------------------------------------------------------------------------

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, ROWS, MOST_TOKENS = 4, 7, 20, 4, 12


def builder() -> AttentionMetadataBuilder:
    spec = AttentionSpec(num_heads=1, num_kv_heads=1, head_size=8, scale=1.0)
    cache = CacheFormat(dtype=torch.float32, block_size=BLOCK_SIZE, max_model_len=MAX_LEN)
    pages = (torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 1, 8) for _ in range(2))
    layer = AttentionLayer("0", make_backend("sdpa", spec, cache, CPU), LayerCache(*pages))
    return AttentionMetadataBuilder({"0": layer}, cache, NUM_BLOCKS)


@quick
@given(data=st.data())
def test_attention_is_filled_as_without_it(data: Any) -> None:
    made = builder()
    num_reqs = data.draw(st.integers(0, ROWS))
    lens = data.draw(st.lists(st.integers(1, 3), min_size=num_reqs, max_size=num_reqs))
    num_tokens = sum(lens)
    width = data.draw(st.integers(0, 6))
    most = data.draw(st.sampled_from([NUM_BLOCKS, NUM_BLOCKS, NUM_BLOCKS + 1]))
    low = data.draw(st.sampled_from([0, 0, -1]))
    batch = AttentionBatch(
        seq_lens=data.draw(arrays((num_reqs,), 2, data.draw(st.sampled_from([9, MAX_LEN + 2])))),
        block_table=data.draw(arrays((num_reqs, width), low, most)),
        slot_mapping=data.draw(
            st.one_of(st.none(), arrays((num_tokens,), low - 1, most * BLOCK_SIZE))
        ),
    )
    query_lens = np.array(lens, np.int32)
    padded = (
        data.draw(st.integers(num_tokens, MOST_TOKENS)),
        data.draw(st.integers(num_reqs, ROWS)),
    )

    def run() -> dict[str, Any]:
        inputs = StepInputs(made.input_spec, CPU, max_num_tokens=MOST_TOKENS, max_num_reqs=ROWS)
        layout = inputs.layout(*padded)
        for name, array in layout.arrays.items():
            array[...] = 1 if name == "block_table" else 77
        made.fill(batch, query_lens, layout.arrays, is_refill=is_refill)
        return {name: array.tolist() for name, array in layout.arrays.items()}

    is_refill = data.draw(st.booleans())
    fast, general = both_ways(run)
    if is_refill and not isinstance(fast, str):  # what nobody reads may be any block
        for held in (fast, general):
            assert all(0 <= n < NUM_BLOCKS for row in held["block_table"] for n in row)
            used = [-(-length // BLOCK_SIZE) for length in held["seq_lens"]]
            held["block_table"] = [*map(operator.getitem, held["block_table"], map(slice, used))]
    assert fast == general


def test_a_plain_batch_is_not_declined() -> None:
    """Or nothing above would say anything."""
    made = builder()
    inputs = StepInputs(made.input_spec, CPU, max_num_tokens=8, max_num_reqs=4)
    lens = np.array([1, 2], np.int32)
    table = np.array([[0, 1], [2, 3]])
    for slots in (None, np.array([4, 8, 9])):
        arrays = inputs.layout(8, 4).arrays
        held = [arrays[spec.name] for spec in made.input_spec]
        given = (lens, np.array([5, 2]), table, slots)
        held = [held[0], held[1], held[3], held[2]]
        limits = (MAX_LEN, NUM_BLOCKS, BLOCK_SIZE)
        assert shortcuts.fill_attention(*given, *held, *limits, False)
    rows = (("x", np.zeros((1, 4), np.int32), 1, 0, 5, -1),)
    assert shortcuts.put_inputs(rows, 1, {"x": np.ones((1, 2), np.int64)}, 2, 1) == 1
    assert rows[0][1].tolist() == [[1, 1, 5, 5]]


@pytest.mark.parametrize(("low", "high", "done"), [(0, 2, 1), (0, 3, 0), (-1, 2, 0)])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_indices_are_looked_at_while_they_are_copied(low, high, done, dtype) -> None:
    """Those of tokens in a batch of 3."""
    rows = (("x", np.zeros(4, dtype), 0, 1, 0, 0),)
    value = np.array([low, high], np.int64)
    assert shortcuts.put_inputs(rows, 1, {"x": value}, 3, 2) == done


# --- addresses --------------------------------------------------------------------------------


def watched(module: torch.nn.Module) -> Any:
    tensors = [module.weight, module.bias]
    addresses = [tensor.data_ptr() for tensor in tensors]
    return shortcuts.watch([module._parameters] * 2, ["weight", "bias"], tensors, addresses)


def test_tensors_are_watched_wherever_there_is_a_c_part() -> None:
    module = torch.nn.Linear(2, 2)
    assert not shortcuts.have_moved(watched(module))
    wrong = shortcuts.watch([module._parameters], ["weight"], [module.weight], [1])
    assert wrong is None


def test_a_watched_tensor_lives_as_long_as_the_watch() -> None:
    module, gone = torch.nn.Linear(2, 2), []
    watch = watched(module)
    weakref.finalize(module.weight, gone.append, "weight")
    del module
    gc.collect()
    assert not gone
    del watch
    assert gone == ["weight"]


# --- tensors among arguments ------------------------------------------------------------------


def places_of(args: tuple[Any, ...]) -> Any:
    positions = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
    addresses = [arg.data_ptr() if isinstance(arg, torch.Tensor) else None for arg in args]
    return shortcuts.places_of(args, addresses, positions)


def arguments() -> tuple[Any, ...]:
    return torch.nn.Parameter(torch.ones(3)), 7, torch.zeros(2, 2), torch.ones(4)[1:]


def test_arguments_that_stay_are_in_place() -> None:
    args = arguments()
    places = places_of(args)
    assert places is not None
    for _ in range(3):
        assert shortcuts.are_in_place(places, args)
    args[0].data.fill_(5)
    args[2].add_(1)
    assert shortcuts.are_in_place(places, args)
    assert shortcuts.are_in_place(places, (args[0], "another", *args[2:]))


@pytest.mark.parametrize("position", [0, 2, 3])
def test_an_argument_elsewhere_is_told(position: int) -> None:
    args = arguments()
    places = places_of(args)
    moved = list(args)
    moved[position] = args[position].clone()
    assert not shortcuts.are_in_place(places, tuple(moved))
    moved[position] = None
    assert not shortcuts.are_in_place(places, tuple(moved))
    assert not shortcuts.are_in_place(places, args[:position])
    held = args[position].data
    args[position].data = args[position].data.clone()
    assert not shortcuts.are_in_place(places, args)
    args[position].data = held
    assert shortcuts.are_in_place(places, args)
    args[position].untyped_storage().resize_(1 << 20)
    assert not shortcuts.are_in_place(places, args)


def test_arguments_that_change_places_are_told() -> None:
    args = arguments()
    places = places_of(args)
    torch.utils.swap_tensors(args[2], args[3])
    assert not shortcuts.are_in_place(places, args)


def test_arguments_that_are_noted_are_not_kept() -> None:
    args = arguments()
    places = places_of(args)
    gone = weakref.ref(args[2])
    del args
    gc.collect()
    assert gone() is None
    assert not shortcuts.are_in_place(places, arguments())


def test_other_objects_are_no_arguments_in_place() -> None:
    args = arguments()
    places = places_of(args)
    for others in ((1, 2, 3, 4), ("", None, [], {}), (object(),) * 4, [*args], ()):
        assert not shortcuts.are_in_place(places, others)
