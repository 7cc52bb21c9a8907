"""Keys and values are stored by the graph of the piece that makes them, and always rightly."""

from __future__ import annotations

import functools
import gc
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from paged_toy import MAX_MODEL_LEN, SPEC, PagedToy, compiled, make_builder, make_loop

from compile_backend.attention.backend import AttentionBackend
from compile_backend.attention.builder import AttentionMetadataBuilder
from compile_backend.attention.kv_cache import LayerCache
from compile_backend.attention.sdpa import SdpaAttention
from compile_backend.attention.spec import CacheFormat
from compile_backend.backend import cudagraph_modes
from compile_backend.batch import BatchDescriptor, of_runner
from compile_backend.config import CUDAGraphMode
from compile_backend.context import ForwardContext, enter_forward_context
from compile_backend.runner_graphs import RunnerGraphs
from compile_backend.step_inputs import StepInputs
from compile_backend.store_ahead import StoreAhead
from compile_backend.support import AttentionCGSupport

if TYPE_CHECKING:
    from paged_toy import Loop

PIECEWISE = CUDAGraphMode.PIECEWISE
CPU = torch.device("cpu")
CACHE = CacheFormat(block_size=4, dtype=torch.float32, max_model_len=MAX_MODEL_LEN)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Counting(SdpaAttention):
    """Notes what was called outside of graphs' replays, of which a CPU's call Python too."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: list[str] = []

    def store(self, *args: Any) -> None:
        self.calls.append("store")
        super().store(*args)

    def attend(self, *args: Any) -> None:
        self.calls.append("attend")
        super().attend(*args)


class Whole(SdpaAttention):
    """As a backend is that overrides `forward`: nothing is known of where it stores."""

    def forward(self, *args: Any) -> None:
        super().forward(*args)


def counting(kind: Any = Counting, mode: str = "PIECEWISE", **options: Any) -> tuple[Loop, Any]:
    made: list[Any] = []

    def make(_: int) -> Any:
        made.append(kind(SPEC, CACHE, CPU))
        return made[-1]

    model = PagedToy()
    loop = make_loop(mode, model, builder=make_builder(model, backend=make), **options)
    return loop, made


def serve(loop: Loop, num_steps: int = 4) -> None:
    """Prompts and decodes, each compared with the reference."""
    requests = [loop.add(range(1, 20)), loop.add(range(4, 23))]
    loop.step([(request, 3) for request in requests])
    for _ in range(num_steps):
        loop.step([(request, 1) for request in requests])
        loop.step([(requests[0], 2)])


def stored_ahead(loop: Loop) -> list[bool]:
    """Of each known step, whether the graphs store; read from what its plan is bound to."""
    steps = loop.runner._captured.piecewise._steps.values()
    return [
        any(
            getattr(held, "__qualname__", "").startswith("StoreAhead.attend_only")
            for value in step.plan.program.__globals__.values()
            for cell in getattr(value, "__closure__", None) or ()
            if callable(held := cell.cell_contents)
        )
        for step in steps
    ]


def test_a_known_step_stores_once_in_each_layer() -> None:
    loop, made = counting()
    serve(loop)
    assert stored_ahead(loop) == [True] * 2
    for backend in made:
        backend.calls.clear()
    loop.step(loop.grow(0, 1))
    calls = [call for backend in made for call in backend.calls]
    assert calls.count("store") == calls.count("attend") == len(loop.model.layer_names)


def test_a_backend_with_a_forward_of_its_own_stores_itself() -> None:
    loop, _ = counting(Whole)
    serve(loop)
    assert stored_ahead(loop) == [False] * 2


def test_a_store_of_its_own_that_no_graph_may_hold_is_not_moved() -> None:
    class Never(Counting):
        support = AttentionCGSupport.NEVER

    class NeverButStores(SdpaAttention):
        support = AttentionCGSupport.NEVER

    for kind, expected in ((Never, False), (NeverButStores, True)):
        loop, _ = counting(kind)
        serve(loop)
        assert stored_ahead(loop) == [expected] * 2


def test_a_forward_that_is_patched_later_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, made = counting()
    serve(loop, 2)
    called = []

    def forward(self: Any, *args: Any) -> None:
        called.append(self)
        AttentionBackend.forward(self, *args)

    monkeypatch.setattr(Counting, "forward", forward)
    loop.step(loop.grow(0, 1))
    assert len(called) == len(loop.model.layer_names)
    assert set(called) == set(made)


def test_a_builder_of_another_class_has_slots_of_its_own() -> None:
    class Shifted(AttentionMetadataBuilder):
        """Gives attention slots that the runner knows nothing of."""

        def build(self, batch: Any, query_lens: Any, tensors: Any) -> Any:
            step = super().build(batch, query_lens, tensors)
            slots = step.metadata.slot_mapping.clone()
            return replace(step, metadata=replace(step.metadata, slot_mapping=slots))

    model = PagedToy()
    made = make_builder(model)
    builder = Shifted(made.layers, made._cache, made._num_blocks)
    loop = make_loop("PIECEWISE", model, builder=builder)
    serve(loop)
    assert not any(stored_ahead(loop))


def test_a_patched_builder_has_slots_of_its_own() -> None:
    model = PagedToy()
    builder = make_builder(model)
    build = builder.build

    def patched(*args: Any) -> Any:
        step = build(*args)
        slots = step.metadata.slot_mapping.clone()
        return replace(step, metadata=replace(step.metadata, slot_mapping=slots))

    builder.build = patched  # type: ignore[method-assign]
    loop = make_loop("PIECEWISE", model, builder=builder)
    serve(loop)
    assert not any(stored_ahead(loop))


@pytest.mark.parametrize("changed", ["values", "key_scale"])
def test_a_cache_that_is_another_in_part_is_seen(changed: str) -> None:
    loop, made = counting()
    serve(loop, 2)
    layers = loop.runner.builder.layers
    for name, layer in list(layers.items()):
        new = {"values": layer.cache.values.clone(), "key_scale": 1.0}[changed]
        layers[name] = replace(layer, cache=replace(layer.cache, **{changed: new}))
    for backend in made:
        backend.calls.clear()
    loop.step(loop.grow(0, 1))
    calls = [call for backend in made for call in backend.calls]
    # The graph of a CPU is Python and stores, and attention does so by itself.
    assert calls.count("store") == 2 * calls.count("attend") == 2 * len(layers)


class ReadsEarly(SdpaAttention):
    """Makes of the tensors what all layers share, before the first of them runs."""

    def prepare(self, metadata: Any) -> Any:
        return metadata.seq_lens.clone()

    def attend(self, query: Any, output: Any, cache: Any, metadata: Any, prepared: Any) -> None:
        if metadata.host is not None:
            true = metadata.host.seq_lens
            assert prepared[: len(true)].tolist() == true.tolist()
        super().attend(query, output, cache, metadata, prepared)


def test_a_backend_may_read_the_step_before_the_first_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device whose memory is not the host's, inputs are there before `prepare`."""
    initialise = StepInputs.__init__

    def apart(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        self._host_bytes = torch.zeros_like(self._device_bytes)

    def send(self: Any, layout: Any) -> None:
        source, target = layout.block
        target.copy_(source)

    monkeypatch.setattr(StepInputs, "__init__", apart)
    monkeypatch.setattr(StepInputs, "send", send)
    monkeypatch.setattr(StepInputs, "sending", lambda *_: None)
    for kind, is_late in ((ReadsEarly, False), (Counting, True)):
        loop, _ = counting(kind)
        serve(loop)
        steps = loop.runner._captured.piecewise._steps.values()
        assert [step.sends_inputs for step in steps] == [is_late] * 2
        loop.step(loop.grow(0, 1))


def read_early(metadata: Any) -> Any:
    return metadata.seq_lens.clone()


@pytest.mark.parametrize("where", ["backend", "class", "builder"])
@pytest.mark.parametrize("is_late", [False, True])
def test_what_reads_the_step_early_may_be_put_there_later(
    where: str, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs come before it from then on, whether graphs were captured already or not."""
    monkeypatch.setattr(Counting, "prepare", Counting.prepare)
    loop, made = counting(is_captured=False)
    builder = loop.runner.builder
    build = builder.build

    def put() -> None:
        if where == "backend":
            made[0].prepare = read_early
        elif where == "class":
            monkeypatch.setattr(Counting, "prepare", lambda _, metadata: read_early(metadata))
        else:
            builder.build = functools.partial(build)

    if not is_late:
        put()
    loop.runner.capture(progress=False)
    serve(loop)
    steps = loop.runner._captured.piecewise._steps.values()
    assert [step.sends_inputs for step in steps] == [is_late] * 2
    put()
    assert [step.sends_inputs for step in steps] == [False] * 2
    loop.step(loop.grow(0, 1))


class Negative(SdpaAttention):
    """Keeps keys with the other sign, so that it reads no cache but its own."""

    def store(self, key: Any, value: Any, cache: Any, metadata: Any) -> None:
        super().store(-key, value, cache, metadata)

    def attend(self, query: Any, *rest: Any) -> None:
        super().attend(-query, *rest)


def test_another_backend_on_the_same_cache_is_seen() -> None:
    loop, _ = counting()
    serve(loop, 2)
    layers = loop.runner.builder.layers
    loop.runner.builder.layers = {
        name: replace(layer, backend=Negative(SPEC, CACHE, CPU)) for name, layer in layers.items()
    }
    loop.done = [0] * len(loop.done)
    loop.step([(0, 3), (1, 3)])
    for _ in range(3):
        loop.step([(0, 1), (1, 1)])


def test_a_store_of_an_instance_is_no_store_of_the_class() -> None:
    class Never(SdpaAttention):
        support = AttentionCGSupport.NEVER

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.store = functools.partial(self.store)  # type: ignore[method-assign]

    loop, _ = counting(Never)
    serve(loop)
    assert stored_ahead(loop) == [False] * 2


@pytest.mark.parametrize("device", DEVICES)
def test_another_cache_is_seen(device: str) -> None:
    loop = make_loop("PIECEWISE", device=device)
    serve(loop)
    layers = loop.runner.builder.layers
    old = []
    for name, layer in layers.items():
        old.append((layer.cache.keys, layer.cache.keys.clone()))
        keys, values = (torch.full_like(t, 5.0) for t in (layer.cache.keys, layer.cache.values))
        layers[name] = replace(layer, cache=LayerCache(keys, values))
    loop.done = [0] * len(loop.done)
    loop.step([(0, 3), (1, 3)])
    for _ in range(3):
        loop.step([(0, 1), (1, 1)])
        loop.step([(0, 2)])
    for layer in layers.values():
        assert not torch.equal(layer.cache.keys, torch.full_like(layer.cache.keys, 5.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_runners_and_modes_in_turns(mode: str, device: str) -> None:
    model = PagedToy().to(device)
    called, builder = compiled(model), make_builder(model)
    loops = [make_loop(mode, model, called=called, builder=builder, device=device) for _ in "ab"]
    loops[1].used = 24
    for loop in loops:
        serve(loop, 1)
    for _ in range(4):
        for loop in loops:
            loop.step(loop.grow(0))
            loop.step(loop.grow(0, 1), highest_mode="PIECEWISE")
            loop.step(loop.grow(1), highest_mode="NONE")


def test_keys_of_no_runner_store_nothing_ahead() -> None:
    """Their slots may lie elsewhere in the next step."""
    ahead = StoreAhead("no such layer", (0, 1), RunnerGraphs())
    piece = ahead.after(lambda *args: list(args))
    assert piece(1, 2) == [1, 2]
    for number in (0, 1):
        key = BatchDescriptor(2, 1, extra=of_runner(number))
        with enter_forward_context(ForwardContext(None, PIECEWISE, key)):
            if number:
                with pytest.raises(RuntimeError, match="no such layer"):
                    piece(1, 2)
            else:
                assert piece(1, 2) == [1, 2]
        assert ahead.attend_only(key) is None


@pytest.mark.parametrize("device", DEVICES)
def test_caches_go_with_their_runner(device: str) -> None:
    model = PagedToy().to(device)
    called = compiled(model)
    builder = make_builder(model)
    loop = make_loop("PIECEWISE", model, called=called, builder=builder, device=device)
    serve(loop)
    cache = weakref.ref(next(iter(builder.layers.values())).cache.keys)
    facts = cudagraph_modes.facts(called)
    assert facts is not None
    (brought,) = facts.of_runners.runners.values()
    assert len({id(cache) for cache in brought.kept.values()}) == len(builder.layers)
    del builder, loop, brought
    gc.collect()
    assert not facts.of_runners.runners
    if device != "cpu":  # graphs of the reference are Python, with their context
        assert cache() is None


def test_graphs_that_are_captured_again_let_go_of_old_caches() -> None:
    """As where an engine renews weights and caches together, again and again."""
    loop = make_loop("PIECEWISE", sizes=(2, 4))
    first, second = loop.add(range(1, 40)), loop.add(range(5, 44))
    layers = loop.runner.builder.layers
    caches: list[weakref.ref[torch.Tensor]] = []
    for _ in range(3):
        for name, layer in list(layers.items()):
            caches.append(weakref.ref(layer.cache.keys))
            cache = LayerCache(layer.cache.keys.clone(), layer.cache.values.clone())
            layers[name] = replace(layer, cache=cache)
        del layer, cache
        weight = loop.model.out[0].weight
        loop.model.out[0].weight = torch.nn.Parameter(weight.detach().clone())
        for _ in range(2):  # each key is captured again
            loop.step([(first, 1), (second, 1)])
            loop.step([(first, 2), (second, 1)])
        gc.collect()
        assert all(reference() is None for reference in caches)


def test_a_recapture_lets_go_of_old_caches() -> None:
    loop = make_loop("PIECEWISE")
    serve(loop, 2)
    layers = loop.runner.builder.layers
    old = [weakref.ref(layer.cache.keys) for layer in layers.values()]
    for name, layer in layers.items():
        cache = LayerCache(layer.cache.keys.clone(), layer.cache.values.clone())
        layers[name] = replace(layer, cache=cache)
    del layer, cache
    gc.collect()
    assert all(reference() is not None for reference in old)  # graphs may still write there
    loop.runner.recapture(progress=False)
    gc.collect()
    assert all(reference() is None for reference in old)
    loop.step(loop.grow(0, 1))


def test_a_backend_that_computes_nothing_says_what_to_override() -> None:
    with pytest.raises(NotImplementedError, match="override `attend`, or `forward`"):
        make_loop("NONE", backend=lambda _: AttentionBackend(SPEC, CACHE, CPU))
