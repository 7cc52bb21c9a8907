"""Compiled pieces on disk: found again by what they compute, and never in the way."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from toy import Twin, rows, toy_model

import compile_backend
from compile_backend import cache as cache_module
from compile_backend.cache import (
    SIZE_VARIABLE,
    ArtefactCache,
    NotStorableError,
    cache_directory,
    cache_size_bytes,
)
from compile_backend.errors import ConfigError
from compile_backend.once import WarnOnce
from compile_backend.op_names import SplittingOps
from compile_backend.piece_compiler import PieceCompiler
from compile_backend.piece_key import stored_key
from compile_backend.pipeline import prepare_for_split
from compile_backend.split import split_graph
from compile_backend.torch_internals import stored_code
from compile_backend.torch_internals.compile_settings import compile_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = "ab" + "0" * 62
MIB = 2**20

# --- one model in several processes -----------------------------------------------------------


def mutating(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    y.add_(x.sum(0))
    return torch.ops.toy.attn_new(x * 2) + y


def viewing(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Writes to a view, and returns one of what it writes to: AOTAutograd's wrappers stay."""
    x[1:].mul_(2)
    z = torch.ops.toy.attn_new(x) + 1
    y.add_(z.sum(0))
    return z, y.view(-1), x


def with_constant(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.toy.attn_new(x * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0] * 2)) - 7


@torch._dynamo.allow_in_graph
def python_code(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def calling_python(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.toy.attn_new(python_code(x) * 3)


CASES: dict[str, tuple[Any, list[tuple[Any, ...]], dict[str, Any]]] = {
    "dynamic": (toy_model("attn_out", 2), [(rows(8),), (rows(5),)], {"dynamic": True}),
    "mutating": (mutating, [(rows(4), rows(4))] * 2, {}),
    "viewing": (viewing, [(rows(8), rows(8)), (rows(5), rows(5))], {"dynamic": True}),
    "with constant": (with_constant, [(rows(4),)] * 2, {}),
    "calling Python": (calling_python, [(rows(4),)] * 2, {}),
}


def run_cases(cache_dir: str) -> dict[str, Any]:
    """Run every case on this process's cache; counts of each, and keys of other pieces."""
    told: dict[str, Any] = {}
    for name, (function, calls, options) in CASES.items():
        torch._dynamo.reset()
        twin = Twin(function, piece_compiler="inductor", cache_dir=cache_dir, **options)
        for args in calls:
            twin(*args)
        report = twin.stats
        told[name] = [report.compiles, report.loads, report.unstorable]
    told["keys"] = [piece_key(spec) for spec in SPECS]
    return told


def start(cache_dir: Path, inductor_dir: Path, seed: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, str(cache_dir)],
        env={
            **os.environ,
            SIZE_VARIABLE: "100",
            "PYTHONHASHSEED": str(seed),
            "TORCHINDUCTOR_CACHE_DIR": str(inductor_dir),
            "TORCHINDUCTOR_VEC_ISA_OK": "1",
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        text=True,
    )


def told_by(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        out, _ = process.communicate(timeout=280)
    finally:
        process.kill()  # nothing, where it has ended
    assert process.returncode == 0
    return dict(json.loads(out.splitlines()[-1]))


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes tell that start at once on an empty cache, and a third one after them.

    Inductor's own cache is empty for the third.
    """
    directory = tmp_path_factory.mktemp("cache")
    both = [start(directory / "ours", directory / "inductor", seed) for seed in (1, 2)]
    first = [told_by(process) for process in both]
    return [*first, told_by(start(directory / "ours", directory / "other", 3))]


def test_two_processes_at_once_compile_each_piece_once(processes: list[dict[str, Any]]) -> None:
    one, other, _ = processes
    for name in CASES:
        pieces = [sum(told[name][:2]) for told in (one, other)]
        assert pieces[0] == pieces[1] > 0
        unstorable = one[name][2]
        assert other[name][2] == unstorable
        assert one[name][0] + other[name][0] == pieces[0] + unstorable


def test_a_second_process_compiles_nothing_but_what_cannot_be_kept(
    processes: list[dict[str, Any]],
) -> None:
    warm = processes[2]
    for name in CASES:
        compiles, loads, unstorable = warm[name]
        assert compiles == unstorable == (name == "calling Python")
        assert loads > 0 or unstorable


def test_keys_are_those_of_every_process(processes: list[dict[str, Any]]) -> None:
    keys = [told["keys"] for told in processes]
    assert keys[0] == keys[1] == keys[2]
    assert len(set(keys[0])) == len(SPECS)


# --- one process ------------------------------------------------------------------------------


def function(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 3 + 1


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(SIZE_VARIABLE, "100")
    return tmp_path / "cache"


def counts_of(cache_dir: Path | str | None, function: Any = function, **options: Any) -> Any:
    """Compiles, loads and pieces that cannot be kept, of a call that finds nothing compiled."""
    torch._dynamo.reset()
    if cache_dir is not None:
        options["cache_dir"] = str(cache_dir)
    twin = Twin(function, piece_compiler="inductor", **options)
    twin(rows(4, seed=0))
    twin(rows(4, seed=1))
    report = twin.stats
    return report.compiles, report.loads, report.unstorable


def files_in(cache_dir: Path) -> list[Path]:
    return sorted(cache_dir.rglob("*.piece"))


def test_what_is_loaded_is_inductors_bare_code(cache_dir: Path) -> None:
    """A loaded piece costs the host as much as a compiled one: the very same code runs."""
    graph = toy.dynamo_graph(function, rows(4))
    prepare_for_split(graph)
    (piece,) = split_graph(graph, SplittingOps(())).pieces
    cache = ArtefactCache(cache_dir, MIB, WarnOnce())
    made: list[Any] = []
    with torch.no_grad():
        for compiles in (1, 0):
            compiler = PieceCompiler("inductor", {}, cache)
            call: Any = compiler.compile(piece).call
            assert compiler.counts.compiles == compiles
            call([rows(4)])
            made.append(call.__closure__[0].cell_contents.call)
    codes = [getattr(each, "__func__", each).__code__ for each in made]
    assert made[0] is not made[1]
    assert codes[0] == codes[1]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


def from_another_version(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"piece 1\n", b"piece 9\n", 1))


def with_other_contents(path: Path) -> None:
    path.write_bytes(cache_module._file_contents(b"no pickle", {}))


def with_a_link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def open_for_all(path: Path) -> None:
    path.chmod(0o666)


@pytest.mark.parametrize(
    "damage",
    [
        *(truncate, empty, flip, from_another_version, with_other_contents),
        *(with_a_link, open_for_all),
    ],
)
def test_a_file_that_cannot_be_used_costs_one_compile_and_one_line(
    damage: Any, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert counts_of(cache_dir) == (1, 0, 0)
    (path,) = files_in(cache_dir)
    damage(path)
    assert counts_of(cache_dir) == (1, 0, 0)
    assert len([line for line in caplog.messages if "is not used and compiled again" in line]) == 1
    assert counts_of(cache_dir) == (0, 1, 0)


def test_wrappers_are_made_anew_around_what_is_loaded(
    cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "compile_backend.piece_artefacts")
    for counted in ((2, 0), (0, 2)):
        torch._dynamo.reset()
        caplog.clear()
        twin = Twin(viewing, piece_compiler="inductor", cache_dir=str(cache_dir), dynamic=True)
        for n in (8, 5, 8, 5, 8):
            twin(rows(n), rows(n))
        assert (twin.stats.compiles, twin.stats.loads) == counted
        assert "keeps AOTAutograd's wrappers" in caplog.text


def test_what_is_disabled_is_neither_read_nor_written(cache_dir: Path) -> None:
    assert counts_of(cache_dir, disable_cache=True) == (1, 0, 0)
    assert not cache_dir.exists()
    assert counts_of(cache_dir) == (1, 0, 0)
    assert counts_of(cache_dir, disable_cache=True) == (1, 0, 0)


def test_a_cache_of_no_size_keeps_nothing(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SIZE_VARIABLE, "0")
    assert counts_of(cache_dir) == (1, 0, 0)
    assert not cache_dir.exists()


def test_the_home_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cache_dir='~nobody-here/x' is in the home of nobody"):
        cache_directory("~nobody-here/x")


def test_the_users_cache_directory_is_the_default(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDAGRAPH_MODES_CACHE", str(cache_dir))
    assert counts_of(None) == (1, 0, 0)
    assert [path.parent.parent for path in files_in(cache_dir)] == [cache_dir / "pieces"]
    monkeypatch.delenv("CUDAGRAPH_MODES_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_dir))
    assert cache_directory(None) == cache_dir / "cudagraph-modes" / "pieces"


def test_an_option_of_inductor_takes_effect_on_a_warm_cache(cache_dir: Path) -> None:
    assert counts_of(cache_dir) == (1, 0, 0)
    other = {"inductor_compile_config": {"max_fusion_size": 1}}
    assert counts_of(cache_dir, **other) == (1, 0, 0)
    assert counts_of(cache_dir, **other) == (0, 1, 0)
    assert counts_of(cache_dir) == (0, 1, 0)


def test_pieces_for_gradients_are_not_kept(cache_dir: Path) -> None:
    torch._dynamo.reset()
    compiled = toy.compiled(function, piece_compiler="inductor", cache_dir=str(cache_dir))
    x = rows(4).requires_grad_()
    compiled(x).sum().backward()
    torch.testing.assert_close(x.grad, (x > 0) * 3.0)
    report = compile_backend.stats(compiled)
    assert (report.compiles, report.loads, report.unstorable) == (1, 0, 1)
    assert not files_in(cache_dir)


def test_what_cannot_be_written_down_runs_all_the_same(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(code: Any) -> bytes:
        raise AssertionError("pickle should not be called")

    caplog.set_level("INFO", "compile_backend.piece_artefacts")
    monkeypatch.setattr(stored_code, "_pickled", refuse)
    assert counts_of(cache_dir) == (1, 0, 1)
    assert "is compiled in every process: it cannot be written down" in caplog.text
    assert not files_in(cache_dir)


def test_one_graph_under_several_assumptions_is_kept_for_each(cache_dir: Path) -> None:
    def branching(x: torch.Tensor) -> torch.Tensor:
        doubled = torch.ops.toy.attn_new(x * 2)
        return doubled + (1 if x.shape[0] > 5 else 2)

    for compiles, loads in ((4, 0), (0, 4)):
        torch._dynamo.reset()
        twin = Twin(branching, piece_compiler="inductor", cache_dir=str(cache_dir), dynamic=True)
        for n in (8, 4, 6, 3, 16):
            twin(rows(n))
        assert (twin.stats.compiles, twin.stats.loads) == (compiles, loads)
        assert twin.stats.graphs == 2


# --- keys -------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.bfloat16)
FUNCTIONS = (torch.relu, torch.ops.aten.cos.default, torch.nn.functional.silu)

# A spec: inputs (sizes, whether transposed, dtype) and calls (function, operand, constant). Sizes
# that are letters are free.
sizes = st.sampled_from([2, 3, "a", "b"])
inputs = st.tuples(st.tuples(sizes, sizes), st.booleans(), st.sampled_from(range(len(DTYPES))))
calls = st.tuples(
    st.sampled_from(range(len(FUNCTIONS))), st.integers(0, 3), st.sampled_from([1, 1.0, 2, True])
)
specs = st.tuples(st.tuples(inputs, inputs), st.lists(calls, min_size=1, max_size=3).map(tuple))


def piece_of(spec: Any, name: str = "v", symbol: int = 0) -> torch.fx.GraphModule:
    """A piece with these inputs and calls; names of values and symbols do not follow from it."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    free: dict[str, Any] = {}
    for size in [n for sizes, _, _ in spec[0] for n in sizes if isinstance(n, str)]:
        if size not in free:
            source = torch._dynamo.source.ConstantSource(f"{name}{len(free) + symbol}")
            created = mode.shape_env.create_symbol(
                7 + len(free), source, torch.fx.experimental.symbolic_shapes.DimDynamic.DYNAMIC
            )
            free[size] = mode.shape_env.create_symintnode(created, hint=7 + len(free))
    graph = torch.fx.Graph()
    values = []
    for number, (sizes, is_transposed, dtype) in enumerate(spec[0]):
        node = graph.placeholder(f"{name}_in_{number}")
        with mode:
            tensor = torch.empty([free.get(n, n) for n in sizes], dtype=DTYPES[dtype])
        node.meta["example_value"] = tensor.t() if is_transposed else tensor
        values.append(node)
    for function, operand, constant in spec[1]:
        called = graph.call_function(
            FUNCTIONS[function], (values[operand % len(values)],), name=f"{name}_{len(values)}"
        )
        values.append(graph.call_method("add", (called, constant)))
    graph.output((values[-1],))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def piece_key(spec: Any, **names: Any) -> str:
    return stored_key(piece_of(spec, **names), ())


def meaning(spec: Any) -> Any:
    """What a piece is: sizes by the order in which they are met, operands that exist, types."""
    met = list(dict.fromkeys(n for sizes, _, _ in _as_seen(spec) for n in sizes))
    inputs = [
        (tuple(f"free {met.index(n)}" if isinstance(n, str) else n for n in sizes), *others)
        for sizes, *others in spec[0]
    ]
    calls = [
        (function, operand % (2 + number), type(constant), constant)
        for number, (function, operand, constant) in enumerate(spec[1])
    ]
    return inputs, calls


def _as_seen(spec: Any) -> Any:
    for sizes, is_transposed, dtype in spec[0]:
        yield sizes[::-1] if is_transposed else sizes, is_transposed, dtype


SPECS: list[Any] = [
    ((((2, "a"), False, 0), (("a", "b"), False, 0)), ((0, 0, 1), (1, 2, 1.0))),
    ((((2, "a"), False, 0), (("b", "a"), False, 0)), ((0, 0, 1), (1, 2, 1.0))),
    ((((2, "a"), False, 1), (("a", "b"), False, 0)), ((0, 0, 1), (1, 2, 1.0))),
    ((((2, "a"), False, 0), (("a", "b"), False, 0)), ((0, 0, 1), (1, 2, 1))),
    ((((2, 3), True, 0), ((3, 2), False, 0)), ((2, 1, 2),)),
]


@given(spec=specs, symbol=st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_names_of_values_and_symbols_do_not_count(spec: Any, symbol: int) -> None:
    assert piece_key(spec) == piece_key(spec, name="other", symbol=symbol)


@given(one=specs, other=specs)
@settings(max_examples=100, deadline=None)
def test_keys_are_equal_just_where_pieces_are(one: Any, other: Any) -> None:
    assert (piece_key(one) == piece_key(other)) == (meaning(one) == meaning(other))


@given(spec=specs, data=st.data())
@settings(max_examples=60, deadline=None)
def test_one_change_changes_the_key(spec: Any, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(spec[1]) - 1))
    changed_call = data.draw(calls)
    other_calls = (*spec[1][:number], changed_call, *spec[1][number + 1 :])
    other = (spec[0], other_calls)
    assert (piece_key(spec) == piece_key(other)) == (meaning(spec) == meaning(other))


class NamedPass(CustomGraphPass):
    """A pass that does nothing, under an identity of its own."""

    def __init__(self, identity: str | None) -> None:
        self.identity = identity

    def __call__(self, graph: torch.fx.Graph) -> None:
        pass

    def uuid(self) -> Any:
        return self.identity


@contextlib.contextmanager
def switched(read: Any, switch: Any, value: Any) -> Any:
    before = read()
    switch(value)
    try:
        yield
    finally:
        switch(before)


def under(context: Any, patches: dict[str, Any] | None = None) -> Any:
    with context:
        return compile_settings(patches or {})


@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        torch.no_grad,
        torch.inference_mode,
        lambda: switched(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        lambda: switched(
            torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
        ),
        lambda: switched(
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
        ),
        lambda: torch.device("meta"),
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        lambda: torch._inductor.config.patch(max_fusion_size=3),
        lambda: torch._functorch.config.patch(functionalize_rng_ops=True),
        lambda: torch.fx.experimental._config.patch(backed_size_oblivious=True),
    ],
    ids=[
        *("autocast", "no_grad", "inference_mode", "default dtype", "deterministic"),
        *("matmul precision", "device", "sdpa", "inductor", "functorch", "sizes"),
    ],
)
def test_switches_of_torch_count(context: Any) -> None:
    plain = compile_settings({})
    changed = under(context())
    assert changed == under(context())
    assert changed != plain


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_threads_count_for_what_runs_on_the_cpu(device: str) -> None:
    graph = torch.fx.Graph()
    with FakeTensorMode():
        graph.placeholder("x").meta["example_value"] = torch.empty(3, device=device)
    graph.output(())
    piece = torch.fx.GraphModule(torch.nn.Module(), graph)
    plain = stored_key(piece, ())
    with switched(torch.get_num_threads, torch.set_num_threads, 7):
        assert (stored_key(piece, ()) != plain) == (device == "cpu")


def test_passes_count_by_their_identity() -> None:
    keys = [
        compile_settings({"post_grad_custom_post_pass": NamedPass(identity)})
        for identity in ("one", "other", "one")
    ]
    assert keys[0] == keys[2]
    assert len({*keys, compile_settings({})}) == 3


def test_passes_without_an_identity_are_not_kept() -> None:
    with pytest.raises(NotStorableError, match="post_grad_custom_post_pass, which has no uuid"):
        compile_settings({"post_grad_custom_post_pass": NamedPass(None)})
    with pytest.raises(NotStorableError, match="no uuid"):
        compile_settings({"post_grad_custom_post_pass": lambda graph: None})


@pytest.mark.parametrize(
    ("patches", "reason"),
    [
        ({"freezing": True}, "weights compiled in"),
        ({"triton.cudagraphs": True}, "captured by Inductor"),
        ({"force_disable_caches": True}, "switched off"),
    ],
)
def test_settings_whose_code_means_nothing_elsewhere(patches: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotStorableError, match=reason):
        compile_settings(patches)


@pytest.fixture
def ops() -> Iterator[torch.library.Library]:
    library = torch.library.Library("cached_toy", "DEF")
    yield library
    library._destroy()


def key_of_call(op: Any) -> str:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["example_value"] = torch.empty(3)
    graph.output((graph.call_function(op, (x,)),))
    return stored_key(torch.fx.GraphModule(torch.nn.Module(), graph), ())


def test_ops_that_are_traced_through_are_not_kept(ops: torch.library.Library) -> None:
    """Their Python code would be compiled in, and may be another one tomorrow."""
    ops.define("traced(Tensor x) -> Tensor")
    ops.impl("traced", lambda x: x + 1, "CompositeImplicitAutograd")
    with pytest.raises(NotStorableError, match=r"traces through the op cached_toy::traced"):
        key_of_call(torch.ops.cached_toy.traced.default)


def test_fakes_of_ops_count(ops: torch.library.Library) -> None:
    ops.define("opaque(Tensor x) -> Tensor")
    keys = [key_of_call(torch.ops.cached_toy.opaque.default)]
    torch.library.register_fake("cached_toy::opaque", lambda x: x.new_empty(3), lib=ops)
    keys += [key_of_call(torch.ops.cached_toy.opaque.default) for _ in range(2)]
    assert keys[0] != keys[1] == keys[2]


def test_contents_of_constants_count() -> None:
    keys = []
    for values in ([1.0, 2.0], [1.0, 2.0], [1.0, 3.0]):
        graph = torch.fx.Graph()
        root = torch.nn.Module()
        root.register_buffer("constant", torch.tensor(values))
        graph.output((graph.get_attr("constant"),))
        keys.append(stored_key(torch.fx.GraphModule(root, graph), ()))
    assert keys[0] == keys[1] != keys[2]


# --- files ------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> ArtefactCache:
    return ArtefactCache(tmp_path / "pieces", 100 * MIB, WarnOnce())


def payloads(store: ArtefactCache, key: str = KEY) -> list[bytes]:
    return [payload for _, payload in store.find(key)]


def test_what_is_kept_is_found_under_its_key_only(store: ArtefactCache) -> None:
    assert payloads(store) == []
    assert store.keep(KEY, "one", b"first", {"piece": "piece_0"})
    assert store.keep(KEY, "two", b"second", {})
    assert store.keep(KEY, "two", b"third", {})
    assert payloads(store) == [b"first", b"third"]
    assert payloads(store, KEY[:-1] + "1") == []
    assert [entry.label for entry in store.entries()].count({"piece": "piece_0"}) == 1


@given(payload=st.binary(max_size=500), cut=st.integers(0, 500))
@settings(max_examples=50, deadline=None)
def test_contents_come_back_whole_or_not_at_all(payload: bytes, cut: int) -> None:
    contents = cache_module._file_contents(payload, {"piece": "é\n"})
    assert cache_module._payload(contents) == payload
    if cut < len(contents):
        with pytest.raises(cache_module._DamagedError):
            cache_module._payload(contents[:cut])


def test_files_and_directories_are_private(store: ArtefactCache) -> None:
    before = os.umask(0)
    try:
        store.keep(KEY, "one", b"", {})
        with store.lock(KEY):
            pass
    finally:
        os.umask(before)
    directories = [store.directory, *(p for p in store.directory.iterdir() if p.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in directories} == {0o700}
    (entry,) = store.entries()
    assert stat.S_IMODE(entry.path.stat().st_mode) == 0o600


def test_nothing_of_another_user_is_read_or_kept(
    store: ArtefactCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.keep(KEY, "one", b"code", {})
    somebody = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: somebody)
    assert payloads(store) == []
    assert not store.keep(KEY, "two", b"code", {})
    with store.lock(KEY):
        assert not (store.directory / "locks").exists()
    assert len(caplog.messages) == 1
    assert "another user's" in caplog.text


def test_a_directory_that_others_write_to_is_not_used(
    store: ArtefactCache, caplog: pytest.LogCaptureFixture
) -> None:
    store.keep(KEY, "one", b"code", {})
    store.directory.chmod(0o777)
    assert payloads(store) == []
    assert not store.keep(KEY, "two", b"code", {})
    assert len(caplog.messages) == 1
    assert "open for others to write to" in caplog.text


def test_a_directory_that_cannot_be_made_costs_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    store = ArtefactCache(tmp_path / "file" / "pieces", MIB, WarnOnce())
    for _ in range(2):
        with store.lock(KEY):
            assert payloads(store) == []
            assert not store.keep(KEY, "one", b"", {})
    assert len(caplog.messages) == 1
    assert "cannot be kept" in caplog.text
    assert store.entries() == store.clear() == []


def test_a_read_only_directory_is_still_read(
    store: ArtefactCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.keep(KEY, "one", b"code", {})

    def refused(*args: Any, **named: Any) -> Any:
        raise OSError(30, "Read-only file system")

    for owner, name in ((cache_module.tempfile, "mkstemp"), (os, "utime"), (Path, "mkdir")):
        monkeypatch.setattr(owner, name, refused)
    assert payloads(store) == [b"code"]
    with store.lock(KEY):
        assert not store.keep(KEY, "two", b"", {})
    assert len(caplog.messages) == 1
    assert "Read-only" in caplog.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_not_used(
    store: ArtefactCache, caplog: pytest.LogCaptureFixture
) -> None:
    store.keep(KEY, "one", b"code", {})
    store.entries()[0].path.chmod(0)
    assert payloads(store) == []
    assert len(caplog.messages) == 1


def test_the_least_recently_used_are_dropped(tmp_path: Path) -> None:
    store = ArtefactCache(tmp_path / "pieces", 3 * MIB, WarnOnce())
    keys = [f"{number:02x}" + "0" * 62 for number in range(4)]
    for age, key in enumerate(keys[:3]):
        store.keep(key, "one", b"x" * (MIB - 1000), {})
        (path,) = (entry.path for entry in store.entries() if entry.path.name.startswith(key))
        os.utime(path, (time.time() - 100 + age,) * 2)
    assert len(payloads(store, keys[0])) == 1  # used again
    store.keep(keys[3], "one", b"x" * (MIB - 1000), {})
    assert [len(payloads(store, key)) for key in keys] == [1, 0, 1, 1]


def test_what_a_killed_process_left_is_dropped(store: ArtefactCache) -> None:
    store.keep(KEY, "one", b"", {})
    leftover, fresh = (store.directory / KEY[:2] / name for name in (".a.part", ".b.part"))
    for path in (leftover, fresh):
        path.write_bytes(b"half")
    os.utime(leftover, (0, 0))
    store.keep(KEY, "two", b"", {})
    assert not leftover.exists()
    assert fresh.exists()
    assert len(payloads(store)) == 2


def test_one_at_a_time_compiles_what_belongs_to_a_key(store: ArtefactCache) -> None:
    compiled = []

    def load_or_compile() -> None:
        with store.lock(KEY):
            if not payloads(store):
                compiled.append(threading.get_ident())
                time.sleep(0.05)
                store.keep(KEY, "one", b"", {})

    threads = [threading.Thread(target=load_or_compile) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1


def test_a_lock_that_is_held_for_too_long_is_not_waited_for(
    store: ArtefactCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_LOCK_TIMEOUT_S", 0.05)
    with store.lock(KEY), store.lock(KEY):
        pass


def test_clearing_removes_all(store: ArtefactCache) -> None:
    for number in range(3):
        store.keep(f"{number}{KEY}", "one", b"", {})
    assert len(store.clear()) == 3
    assert store.entries() == []


def test_a_size_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SIZE_VARIABLE, "2 GB")
    with pytest.raises(ConfigError, match=f"{SIZE_VARIABLE}='2 GB' is no number of megabytes"):
        cache_size_bytes()
    monkeypatch.setenv(SIZE_VARIABLE, "")
    assert cache_size_bytes() == 2048 * MIB


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run_cases(sys.argv[1])))
