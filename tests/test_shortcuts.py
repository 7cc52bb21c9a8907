"""The C part does what the general code does, or declines: memory and errors are the same."""

from __future__ import annotations

import gc
import operator
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from fake_driver import Driver
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

if TYPE_CHECKING:
    from collections.abc import Sequence

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


# --- copies -----------------------------------------------------------------------------------


def test_copies_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    sources = [torch.randn(3, 4).t(), torch.arange(5), torch.randn(()), torch.empty(0)]
    targets = [torch.empty_strided(s.size(), s.stride(), dtype=s.dtype) for s in sources]
    event: Any = SimpleNamespace(cuda_event=5)
    copies = shortcuts.copies_of(list(zip(targets, sources, strict=True)), event)
    for _ in range(2):
        for source in sources:
            source.mul_(3)
        assert shortcuts.copy(copies)
        assert all(map(torch.equal, targets, sources))
    assert driver.recorded == [(5, 70), (5, 70)]


def test_one_copy_goes_to_any_address(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    first, source, other = torch.zeros(4), torch.ones(4), torch.zeros(4)
    copies = shortcuts.copies_of([(first, source)])
    assert shortcuts.copy_to(copies, other.data_ptr())
    assert torch.equal(other, source)
    assert not first.any()
    both = shortcuts.copies_of([(first, source), (other, source)])
    assert not shortcuts.copy_to(both, other.data_ptr())
    wrong: Any = (0, -1, "text", 2**70)
    assert not any(shortcuts.copy_to(copies, address) for address in wrong)
    driver.device = 1
    assert not shortcuts.copy_to(copies, other.data_ptr())


@pytest.mark.parametrize("why", ["device", "error"])
def test_copies_that_cannot_be_are_left_to_torch(monkeypatch, why) -> None:
    driver = Driver(monkeypatch)
    target, source = torch.zeros(4), torch.ones(4)
    copies = shortcuts.copies_of([(target, source)])
    assert shortcuts.copy(copies)
    setattr(driver, why, 1)
    assert not shortcuts.copy(copies)
    assert not driver.recorded


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (torch.zeros(4), torch.ones(4, dtype=torch.float64)),
        (torch.zeros(4), torch.ones(5)),
        (torch.zeros(2, 2), torch.ones(2, 2).t()),
        (torch.zeros(4), torch.ones(1).expand(4)),
        (torch.zeros(8)[::2], torch.ones(8)[::2]),
        (torch.zeros(4, dtype=torch.complex64), torch.ones(4, dtype=torch.complex64).conj()),
        (torch.zeros(4), torch.ones(4, dtype=torch.complex64).conj().imag),
    ],
)
def test_bytes_are_copied_of_the_same_bytes_only(monkeypatch, target, source) -> None:
    Driver(monkeypatch)
    assert shortcuts.copies_of([(target, source)]) is None
    assert shortcuts.copies_of([]) is None


def test_memory_of_a_host_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch)
    x = torch.ones(4)
    assert shortcuts.copies_of([(torch.zeros(4), x)]) is not None
    monkeypatch.setattr(shortcuts, "DRIVEN", "cuda")
    assert shortcuts.copies_of([(torch.zeros(4), x)]) is None
    assert copied((x,), [0])[0] is None


# --- copies of arguments ----------------------------------------------------------------------


def copied(
    args: tuple[Any, ...], positions: list[int], written: Sequence[int] = ()
) -> tuple[Any, list[torch.Tensor]]:
    targets = [
        torch.empty_strided(args[i].size(), args[i].stride(), dtype=args[i].dtype)
        for i in positions
    ]
    return shortcuts.inputs_of(args, positions, targets, written), targets


def test_arguments_are_copied_wherever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch)

    def make() -> tuple[Any, ...]:
        return (torch.randint(9, (2, 3)), 7, torch.randn(4, 2).t(), torch.randn(()), None)

    inputs, targets = copied(make(), [0, 2, 3])
    for _ in range(3):
        args = make()
        assert shortcuts.copy_inputs(inputs, args)
        assert all(map(torch.equal, targets, [args[0], args[2], args[3]]))


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(3, 2),
        torch.ones(2, 2),
        torch.ones(6),
        torch.ones(3, 2).t().contiguous().double(),
        torch.ones(2, 3, dtype=torch.int32),
        torch.nn.Parameter(torch.ones(2, 3)),
        torch.ones(1).expand(2, 3),
        None,
        3,
    ],
    ids=lambda other: type(other).__name__,
)
def test_other_arguments_are_left_to_torch(monkeypatch, other) -> None:
    Driver(monkeypatch)
    first = torch.zeros(2, 3)
    inputs, targets = copied((first,), [0])
    assert shortcuts.copy_inputs(inputs, (torch.full((2, 3), 2.0),))
    assert not shortcuts.copy_inputs(inputs, (other,))
    assert not shortcuts.copy_inputs(inputs, ())
    assert targets[0].eq(2).all()


@pytest.mark.parametrize("why", ["device", "error"])
def test_arguments_that_cannot_be_copied_are_left_to_torch(monkeypatch, why) -> None:
    driver = Driver(monkeypatch)
    args = (torch.zeros(2, 3),)
    inputs, targets = copied(args, [0])
    assert shortcuts.copy_inputs(inputs, args)
    setattr(driver, why, 1)
    assert not shortcuts.copy_inputs(inputs, args)
    assert len(targets) == 1


def test_some_arguments_are_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch)
    many = tuple(torch.ones(2) for _ in range(shortcuts.MOST_INPUTS + 1))
    assert copied(many, list(range(len(many))))[0] is None
    assert copied((torch.ones((1,) * 6),), [0])[0] is None
    assert copied((torch.ones(4)[::2],), [0])[0] is None
    assert copied((torch.ones(2), torch.nn.Parameter(torch.ones(2))), [0, 1])[0] is None
    assert copied((), [])[0] is None


# --- calls that are one replay ----------------------------------------------------------------


class Call:
    """A call of an input that moves and a weight that stays, and what there is to replay it."""

    def __init__(self, driver: Driver, written: torch.Tensor | None = None) -> None:
        self.args = (torch.randn(2, 3), torch.randn(4))
        self.seen: list[torch.Tensor] = []
        starts = [] if written is None else [written.data_ptr()]
        self.inputs, (self.target,) = copied(self.args, [0], written=starts)
        self.places = shortcuts.places_of(self.args, [None, self.args[1].data_ptr()], [1])
        graph: Any = SimpleNamespace(raw_cuda_graph_exec=lambda: 7)
        self.launch = shortcuts.launch_of(graph, 0)
        driver.launched[7] = lambda: self.seen.append(self.target.clone())

    def replay(self, *args: Any) -> int:
        return shortcuts.replay_call(self.places, self.inputs, self.launch, args or self.args)


def test_a_call_is_replayed_on_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(Driver(monkeypatch))
    for _ in range(3):
        x = torch.randn(2, 3)
        assert call.replay(x, call.args[1]) == shortcuts.LAUNCHED
        assert torch.equal(call.seen[-1], x)
    assert len(call.seen) == 3
    done = shortcuts.replay_call(call.places, None, call.launch, call.args)
    assert done == shortcuts.LAUNCHED
    assert torch.equal(call.seen[-1], x)


@pytest.mark.parametrize(
    "why", ["device", "error", "capturing", "capture error", "moved", "other"]
)
def test_a_call_that_is_another_one_is_not_replayed(monkeypatch, why) -> None:
    driver = Driver(monkeypatch)
    call = Call(driver)
    args = list(call.args)
    if why == "capturing":
        driver.capturing = 1
    elif why == "capture error":
        driver.capture_error = 906
    elif why == "moved":
        args[1].data = args[1].clone()
    elif why == "other":
        args[0] = torch.randn(3, 2)
    else:
        setattr(driver, why, 1)
    call.target.zero_()
    assert call.replay(*args) == shortcuts.NOTHING
    assert not call.seen
    assert not call.target.any()
    strange: Any = (None, 3, "text", [*call.args])
    for other in strange:
        assert shortcuts.replay_call(call.places, None, other, call.args) == 0
        assert shortcuts.replay_call(call.places, None, call.launch, other) == 0
        assert shortcuts.replay_call(other, None, call.launch, call.args) == 0


def test_inputs_of_a_call_may_be_sent_without_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    call = Call(driver)
    driver.launch_error = 1
    assert call.replay() == shortcuts.INPUTS_SENT
    assert torch.equal(call.target, call.args[0])
    assert not call.seen


def test_inputs_in_memory_that_is_written_are_left_to_torch(monkeypatch) -> None:
    call = Call(Driver(monkeypatch), written=(memory := torch.randn(12)))
    weight = call.args[1]
    for x in (memory[:6].view(2, 3), memory[6:].view(2, 3)):
        assert call.replay(x, weight) == shortcuts.NOTHING
    assert not call.seen
    assert call.replay(memory.clone()[6:].view(2, 3), weight) == shortcuts.LAUNCHED


def test_empty_inputs_are_in_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch)
    memory = torch.randn(6)
    inputs, _ = copied((memory[:0],), [0], written=[memory.data_ptr()])
    assert shortcuts.copy_inputs(inputs, (memory[:0],))
