"""What only a CUDA device can show: real addresses, real pools, real capture errors."""

import random
import threading

import pytest
import torch
from torch import nn

from compile_backend import CaptureError, CUDAGraphMode, capture, stats
from compile_backend.backend import CudagraphModesBackend
from compile_backend.graph_engine import CudaEngine, Trial

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("without_gradients")]

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


LIBRARY = torch.library.Library("gpu_tests", "DEF")
WORK: dict[str, object] = {}


def _define(name: str, impl) -> None:
    """An op that stands for attention: fresh output, same shape as its input."""
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    LIBRARY.impl(name, impl, "CUDA")
    torch.library.register_fake(f"gpu_tests::{name}", torch.empty_like, lib=LIBRARY)


def _syncs(x: torch.Tensor) -> torch.Tensor:
    return x * (2.0 if x.sum().item() < 1e9 else 3.0)


def _compiles_at_four_rows(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] != 4:
        return x * 2
    if "nested" not in WORK:
        WORK["nested"] = torch.compile(lambda y: torch.sin(y) * 2, dynamic=False)
    return WORK["nested"](x)


def _autotunes_at_eight_rows(x: torch.Tensor) -> torch.Tensor:
    import triton
    import triton.language as tl

    if x.shape[0] != 8:
        return x + 1
    if "kernel" not in WORK:

        @triton.autotune(
            configs=[triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})], key=["n"]
        )
        @triton.jit
        def add_one(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
            offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            values = tl.load(x_ptr + offsets, mask=offsets < n)
            tl.store(y_ptr + offsets, values + 1, mask=offsets < n)

        WORK["kernel"] = add_one
    y = torch.empty_like(x)
    grid = lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)  # noqa: E731
    WORK["kernel"][grid](x, y, x.numel())
    return y


_define("syncs", _syncs)
_define("compiles", _compiles_at_four_rows)
_define("autotunes", _autotunes_at_eight_rows)


class Layers(nn.Module):
    """Linear layers with SDPA between them, on rows of 64."""

    def __init__(self, num_layers: int = 4, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            q = torch.relu(layer(x)).view(1, x.shape[0], 2, -1).transpose(1, 2)
            attended = nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2)
            x = x + attended.reshape(x.shape)
        return x * 2


class AroundOp(nn.Module):
    """Linear, one custom op, linear."""

    def __init__(self, op) -> None:
        super().__init__()
        self.first, self.last, self.op = nn.Linear(64, 64), nn.Linear(64, 64), op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.op(self.first(x)))


def compiled(model, mode: str, **options):
    backend = CudagraphModesBackend()
    options = {"cudagraph_mode": mode, "cudagraph_capture_sizes": [1, 2, 4, 8], **options}
    run = torch.compile(model, backend=backend, dynamic=True, options=options)
    return run, backend


def assert_same(run, model, rows: int, device: torch.device) -> None:
    x = torch.randn(rows, 64, device=device)
    torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_sizes_captured_largest_first_replay_in_any_order(mode, device):
    model = Layers().to(device)
    run, backend = compiled(model, mode)
    with capture():
        for rows in (8, 4, 2):
            assert_same(run, model, rows, device)
    order = [8, 4, 2] * 10
    random.Random(0).shuffle(order)
    for rows in order:
        assert_same(run, model, rows, device)
    graphs = 5 if mode == "PIECEWISE" else 1
    report = backend.stats(run)
    assert report.total("captures") == 3 * graphs
    assert report.total("replays") == 30 * graphs


@pytest.mark.parametrize("op", ["compiles", "autotunes"])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_code_first_compiled_or_tuned_at_one_size_only_is_captured_there(op, mode, device):
    WORK.clear()
    op = getattr(torch.ops.gpu_tests, op)
    model = AroundOp(op).to(device)
    name = f"gpu_tests::{op.__name__}"
    run, backend = compiled(model, mode, splitting_ops=[name], attention_support={name: "ALWAYS"})
    for _ in range(4):
        for rows in (8, 4, 2):
            assert_same(run, model, rows, device)
    report = backend.stats(run)
    assert report.total("failed_captures") == 0
    assert report.total("replays") > 0


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_state_fed_back_from_output_to_input(mode, device):
    class Recurrent(Layers):
        def forward(self, x, state):
            state = state + super().forward(x)
            return state.sum(0), state

    model = Recurrent().to(device)
    run, backend = compiled(model, mode)
    state = expected = torch.zeros(4, 64, device=device)
    for _ in range(8):
        x = torch.randn(4, 64, device=device)
        out, state = run(x, state)
        expected_out, expected = model(x, expected)
        torch.testing.assert_close(out, expected_out, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-4)
    assert backend.stats(run).total("replays") > 0


@pytest.mark.parametrize("is_piece", [False, True], ids=["eager section", "piece"])
def test_host_sync_falls_back_and_later_captures_work(is_piece, device):
    model = AroundOp(torch.ops.gpu_tests.syncs).to(device)
    splitting = [] if is_piece else ["gpu_tests::syncs"]
    run, backend = compiled(
        model,
        "FULL",
        splitting_ops=splitting,
        attention_support={"gpu_tests::syncs": "ALWAYS"},
    )
    for _ in range(5):
        assert_same(run, model, 4, device)
    report = backend.stats(run)
    assert report.total("failed_captures", FULL) == 1
    assert report.total("replays", FULL) == 0
    if not is_piece:
        assert report.total("replays", PIECEWISE) > 0
    torch.rand(4, device=device)
    healthy = Layers().to(device)
    other = torch.compile(
        healthy, backend=backend, dynamic=True, options={"cudagraph_mode": "FULL"}
    )
    for _ in range(4):
        assert_same(other, healthy, 4, device)
    assert backend.stats(other).total("replays", FULL) == 3


def test_memory_of_all_sizes_is_near_that_of_the_largest(device):
    def pool_bytes(sizes):
        model = Layers(4, 4096).to(device)
        run, _backend = compiled(model, "PIECEWISE", cudagraph_capture_sizes=sorted(sizes))
        before = torch.cuda.memory_reserved()
        with capture():
            for rows in sizes:
                run(torch.randn(rows, 4096, device=device))
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
        return torch.cuda.memory_reserved() - before

    largest = pool_bytes([4096])
    together = pool_bytes([4096, 2048, 1024, 512, 256, 128, 64])
    assert largest > 0
    assert together <= 1.3 * largest


def test_other_threads_may_allocate_and_copy_during_capture(device):
    engine = CudaEngine(device)
    x = torch.ones(1024, 1024, device=device)
    stop = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while not stop.is_set():
                torch.empty(1 << 22, device=device).copy_(torch.ones(1 << 22))
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(20):
            graph = engine.capture(lambda x: x @ x, [x], Trial())
            graph.replay()
            assert graph.outputs[0, 0].item() == 1024
    finally:
        stop.set()
        thread.join()
    assert not errors


def test_random_numbers_differ_in_every_replay_also_after_a_broken_capture(device):
    engine = CudaEngine(device)
    x = torch.zeros(8, device=device)

    def draws_and_syncs(x):
        return torch.rand(8, device=device) * x.sum().item()

    for _ in range(2):
        with pytest.raises(CaptureError):
            engine.capture(draws_and_syncs, [x], Trial())
        torch.rand(8, device=device)
        graph = engine.capture(lambda x: x + torch.rand(8, device=device), [x], Trial())
        graph.replay()
        first = graph.outputs.clone()
        graph.replay()
        assert not torch.equal(first, graph.outputs)


@pytest.mark.parametrize("piece_compiler", ["inductor", "eager"])
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_random_numbers_pass_verification_and_are_those_without_it(mode, piece_compiler, device):
    def function(x: torch.Tensor) -> torch.Tensor:
        q = nn.functional.dropout(x * 2, 0.5)
        y = nn.functional.scaled_dot_product_attention(q, x, x)
        return nn.functional.dropout(y, 0.5) + torch.rand_like(x) + torch.randn(64, device=device)

    results: dict[str, list[torch.Tensor]] = {}
    for debug in ("off", "verify"):
        torch._dynamo.reset()
        torch.manual_seed(3)
        run, backend = compiled(function, mode, debug=debug, piece_compiler=piece_compiler)
        results[debug] = [run(torch.ones(4, 64, device=device)) for _ in range(5)]
        assert backend.stats(run).total("replays") >= 4
    torch.testing.assert_close(results["verify"], results["off"])
    assert not torch.equal(*results["verify"][-2:])


def test_weak_outputs_let_later_captures_reuse_their_memory(device):
    engine = CudaEngine(device)
    x = torch.ones(1 << 20, device=device)
    graph = engine.capture(lambda x: x * 2, [x], Trial())
    graph.outputs = engine.keep_weakly(graph.outputs)
    address = graph.outputs.data_ptr()
    other = engine.capture(lambda x: x * 3, [x], Trial())
    assert other.outputs.data_ptr() == address


def test_mode_names_are_those_of_the_report(device):
    model = Layers().to(device)
    run = torch.compile(model, backend="cudagraph_modes", options={"cudagraph_mode": "FULL"})
    for _ in range(3):
        run(torch.randn(4, 64, device=device))
    assert stats(run).mode_resolved == ("FULL",)
