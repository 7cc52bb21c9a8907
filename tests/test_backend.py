"""What users do around compiled models: errors, threads, gradients, resets, copies, options."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
import toy
from torch.nn.attention.flex_attention import flex_attention
from toy import FULL, MODES, NONE, PIECEWISE, WIDTH, Twin, compiled, counts, rows, toy_model

from compile_backend import (
    BatchDescriptor,
    ConfigError,
    keep_argument_guards_unsafe,
    reset,
    set_forward_context,
    stats,
)
from compile_backend.backend import CudagraphModesBackend, cudagraph_modes
from compile_backend.context import current_forward_context

attn_new = torch.ops.toy.attn_new
GRAPH_MODES = pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])


# --- other ways of running --------------------------------------------------------------------


@GRAPH_MODES
@pytest.mark.parametrize("piece_compiler", ["eager", "inductor"])
def test_autocast_across_cuts(mode, piece_compiler):
    class Cast(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.two = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                y = self.two(attn_new(self.one(x)))
                with torch.autocast("cpu", enabled=False):
                    z = attn_new(self.two(y.float()))
                u = self.two(z)
            return self.one(u.float()), u, z, y

    both = Twin(Cast(), cudagraph_mode=mode, piece_compiler=piece_compiler)
    for _ in range(3):
        both(rows(4))
    assert not torch.is_autocast_enabled("cpu")


@GRAPH_MODES
def test_gradients_first_then_inference(mode, caplog):
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        with torch.no_grad():
            y = torch.ops.toy.tally(y) + 1
        return y * w.sum()

    run = compiled(function, cudagraph_mode=mode)
    w = rows(WIDTH).requires_grad_()
    mine, theirs = w.detach().clone().requires_grad_(), w
    for _ in range(3):
        mine.grad = theirs.grad = None
        x = rows(4)
        run(x, mine).sum().backward()
        function(x, theirs).sum().backward()
        torch.testing.assert_close(mine.grad, theirs.grad)
        assert torch.is_grad_enabled()
        with torch.no_grad():
            torch.testing.assert_close(run(x, mine), function(x, theirs))
    assert stats(run).total("replays") > 0
    assert len([r for r in caplog.records if "needs gradients" in r.message]) == 1


@GRAPH_MODES
@pytest.mark.parametrize("variant", ["attn_out", "attn_state"])
def test_inference_mode_and_no_grad_take_turns(mode, variant):
    model = toy_model(variant)
    eager, run = copy.deepcopy(model), compiled(model, cudagraph_mode=mode)
    for turn in (True, False, False, True, True, False):
        x = rows(4)
        with torch.inference_mode() if turn else torch.no_grad():
            torch.testing.assert_close(run(x), eager(x))


@GRAPH_MODES
def test_a_graph_break_gives_two_graphs(mode):
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = attn_new(x * 2)
        torch._dynamo.graph_break()
        return attn_new(y + 1) * 2

    both = Twin(broken, cudagraph_mode=mode)
    for n in (8, 4) * 3:
        both(rows(n))
    assert both.stats.graphs >= 2


@GRAPH_MODES
def test_strides_that_change_are_compiled_or_copied_right(mode):
    both = Twin(lambda x: attn_new(x * 2) + x, cudagraph_mode=mode)
    for _ in range(3):
        both(rows(4))
        both(rows(4, 2 * WIDTH)[:, WIDTH:])
        both(rows(WIDTH, 4).t())
        both(rows(1).expand(4, WIDTH))


@pytest.mark.parametrize(
    "function", [lambda: torch.ones(3) * 2, lambda: attn_new(rows(1) * 0) + 1]
)
def test_a_function_without_inputs(function):
    both = Twin(function, cudagraph_mode="FULL")
    for _ in range(3):
        both()


@GRAPH_MODES
@pytest.mark.parametrize(
    "function",
    [
        lambda x: (attn_new(x),),
        lambda x: attn_new(x) + 1,
        lambda x: attn_new(attn_new(x)) * 2,
        lambda x: (torch.ops.toy.attn_view(x),),
        lambda x: torch.ops.toy.attn_view(x * 2),
        lambda x: (x * 2, attn_new(x)),
    ],
    ids=["alone", "first", "adjacent", "view of the input", "view of a piece", "last"],
)
def test_attention_anywhere(mode, function):
    both = Twin(function, cudagraph_mode=mode)
    for _ in range(3):
        both(rows(4))


@GRAPH_MODES
@pytest.mark.parametrize("piece_compiler", ["eager", "inductor"])
def test_builtin_attention_is_split_out_by_default(mode, piece_compiler):
    def function(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(1, -1, 2, 5).transpose(1, 2) for part in (x * 2, x + 1, x))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(x.shape) + x

    options = {"splitting_ops": None, "attention_support": None, "piece_compiler": piece_compiler}
    both = Twin(function, cudagraph_mode=mode, **options)
    for _ in range(3):
        both(rows(4))
    assert both.stats.eager_sections == 1
    assert both.stats.mode_resolved == (mode,)
    assert both.stats.total("replays") > 0


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_split_out_by_default():
    both = Twin(
        lambda q: flex_attention(q * 2, q, q) + 1,
        cudagraph_mode="FULL_AND_PIECEWISE",
        splitting_ops=None,
        attention_support=None,
    )
    for _ in range(3):
        both(rows(1, 2, 16, 16))
    assert both.stats.eager_sections == 1


def test_layers_that_share_one_compiled_function_are_not_captured_for_ever(caplog):
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    call = compiled(lambda layer, x: layer(x).relu(), cudagraph_mode="FULL")
    with torch.no_grad():
        for step in range(12):
            x = rows(4) + step
            for layer in layers:
                torch.testing.assert_close(call(layer, x), layer(x).relu())
        assert stats(call).total("captures") == 8
        reset(call)
        for _ in range(3):
            call(layers[0], rows(4))
    assert stats(call).total("captures") == 9
    assert sum("share one compiled function" in record.message for record in caplog.records) == 1


def test_random_numbers_are_new_in_every_replay_and_follow_the_seed():
    def function(x: torch.Tensor) -> torch.Tensor:
        return attn_new(torch.nn.functional.dropout(x, 0.5)) + torch.rand_like(x)

    run, x = compiled(function, cudagraph_mode="FULL"), rows(4)
    results = [run(x) for _ in range(4)]
    assert len({tuple(result.flatten().tolist()) for result in results}) == 4
    torch.manual_seed(1)
    actual = run(x)
    torch.manual_seed(1)
    torch.testing.assert_close(actual, function(x))


@GRAPH_MODES
@pytest.mark.parametrize("piece_compiler", ["eager", "inductor"])
def test_random_numbers_pass_verification_and_are_those_without_it(mode, piece_compiler):
    def function(x: torch.Tensor) -> torch.Tensor:
        y = attn_new(torch.nn.functional.dropout(x * 2, 0.5))
        return torch.nn.functional.dropout(y, 0.5) + torch.rand_like(x) + torch.bernoulli(x * 0.5)

    results: dict[str, list[torch.Tensor]] = {}
    for debug in ("off", "verify"):
        torch.manual_seed(3)
        options = {"piece_compiler": piece_compiler, "debug": debug}
        run, x = compiled(function, cudagraph_mode=mode, **options), torch.ones(4, WIDTH)
        results[debug] = [run(x) for _ in range(5)]
        assert stats(run).total("replays") >= 4
    torch.testing.assert_close(results["verify"], results["off"])
    assert not torch.equal(*results["verify"][-2:])


# --- values that graphs would freeze ----------------------------------------------------------


@GRAPH_MODES
def test_a_float_argument_that_changes(mode):
    both = Twin(lambda x, scale: attn_new(x * scale) * scale, cudagraph_mode=mode)
    for scale in (0.5, 0.25, 1.5, 0.25, 3.0, 0.125):
        both(rows(4), scale)


@GRAPH_MODES
def test_an_integer_argument_that_changes(mode):
    both = Twin(lambda x, n: attn_new(x * n) * n + n, cudagraph_mode=mode)
    for n in (5, 7, 9, 7, 5, 9, 7):
        both(rows(4), n)


def test_an_integer_that_is_new_in_every_step_does_not_make_a_graph_each_time():
    both = Twin(lambda x, n: attn_new(x * 2) + n, cudagraph_mode="FULL")
    for n in range(2, 42):
        both(rows(4), n)
        both(rows(4), n)
    assert both.stats.total("captures") < 30


@GRAPH_MODES
def test_a_number_read_from_a_tensor(mode):
    def function(x: torch.Tensor) -> torch.Tensor:
        positive = (x > 0).sum().item()
        return attn_new(x * 2) * positive

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        both = Twin(function, cudagraph_mode=mode)
        for _ in range(4):
            both(rows(4))


@GRAPH_MODES
def test_a_size_that_depends_on_data(mode):
    def function(x: torch.Tensor) -> Any:
        found = torch.nonzero(x[:, 0] > 0)
        return attn_new(x * 2).sum() + x[found[:, 0]].sum(), found

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        both = Twin(function, cudagraph_mode=mode)
        for n in range(5):
            x = rows(4).abs()
            x[: n % 4] *= -1
            both(x)


@GRAPH_MODES
def test_results_of_a_section_that_share_memory_and_are_written(mode):
    def function(x: torch.Tensor) -> Any:
        out = attn_new(x * 2)
        flat = out.view(-1)
        other = attn_new(out)
        flat.add_(1)
        return out * 2 + other

    both = Twin(function, cudagraph_mode=mode)
    for _ in range(3):
        both(rows(4))


def test_weights_rebound_again_and_again_with_a_view_that_is_written():
    class Viewing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(rows(WIDTH), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = x @ self.weight
            torch.ops.toy.attn_view(q).add_(1)
            return attn_new(q) + q

    both = Twin(Viewing(), cudagraph_mode="PIECEWISE")
    for _ in range(6):
        for _ in range(3):
            both(rows(4))
        for model in (both.model, both.eager):
            model.weight.data = rows(WIDTH, seed=1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe},
        {"guard_filter_fn": keep_argument_guards_unsafe},
    ],
)
@pytest.mark.parametrize("when", ["in place", "data", "parameter", "buffer"])
@GRAPH_MODES
def test_weights_changed_after_capture(mode, when, options):
    """With Dynamo's guards on modules, and without them."""
    both = Twin(toy_model("attn_state"), cudagraph_mode=mode, **options)
    for _ in range(3):
        both(rows(4))
    for seed in range(3):
        for model in (both.model, both.eager):
            new = rows(WIDTH, seed=seed)
            if when == "in place":
                model.head.weight.copy_(new)
            elif when == "data":
                model.head.weight.data = new
            elif when == "parameter":
                model.head.weight = torch.nn.Parameter(new, requires_grad=False)
            else:
                model.layers[1].state = new[0]
        for _ in range(3):
            both(rows(4))


@pytest.mark.parametrize("change", ["dtype", "shape", "strides"])
@GRAPH_MODES
def test_a_weight_of_another_format_is_refused_where_no_guard_sees_it(mode, change):
    model = toy_model()
    options = {"cudagraph_mode": mode, "guard_filter_fn": keep_argument_guards_unsafe}
    run = compiled(model, **options)
    with torch.no_grad():
        for _ in range(3):
            run(rows(4))
        kept = model.head.weight  # so that no other comes to lie there
        new = {"dtype": rows(WIDTH).double(), "shape": rows(1), "strides": rows(WIDTH).T}[change]
        model.head.weight = torch.nn.Parameter(new, requires_grad=False)
        with pytest.raises(
            ConfigError, match=r"head.*weight.*was compiled for torch.float32 of shape.* now"
        ):
            run(rows(4))
        model.head.weight = torch.nn.Parameter(rows(WIDTH), requires_grad=False)
        x = rows(4)
        torch.testing.assert_close(run(x), model(x))
    assert kept.dtype == torch.float32


class Holder:
    """An argument that holds something."""

    of_class = 1

    def __init__(self) -> None:
        self.number = 3


def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def plus_two(x: torch.Tensor) -> torch.Tensor:
    return x + 2


def with_held(x, held):
    return x * held.number


def with_callback(x, held):
    return held(x)


def with_maybe(x, held):
    return x + getattr(held, "extra", 0)


def with_default(x, held):
    return x + held.of_class


def with_callbacks(x, held):
    return held[0](x) * len(held)


@pytest.mark.parametrize(
    ("step", "values"),
    [
        (with_held, [{"number": 3}, {"number": 7}]),
        (with_maybe, [{}, {"extra": 5}, {}]),
        (with_default, [{}, {"of_class": 5}]),
        (with_callback, [plus_one, plus_two]),
        (with_callbacks, [[plus_one], [plus_two], [plus_two, plus_one]]),
    ],
)
def test_what_arguments_hold_is_looked_at(step, values):
    torch._dynamo.reset()
    run = compiled(step, cudagraph_mode="FULL", guard_filter_fn=keep_argument_guards_unsafe)
    x, held = rows(4), Holder()
    with torch.no_grad():
        for value in values:
            if isinstance(value, dict):
                vars(held).clear()
                vars(held).update(value)
            for _ in range(3):
                given = held if isinstance(value, dict) else value
                torch.testing.assert_close(run(x, given), step(x, given))


def test_guards_on_arguments_are_kept():
    """Numbers, shapes and keywords are looked at; modules are not."""
    model = toy_model()
    seen = []

    def step(x: torch.Tensor, n: int, **kwargs: int) -> torch.Tensor:
        return model(x) * n + sum(kwargs.values())

    def filtered(entries):
        kept = keep_argument_guards_unsafe(entries)
        seen.append((sum(kept), len(kept)))
        return kept

    torch._dynamo.reset()
    run = compiled(step, cudagraph_mode="FULL", guard_filter_fn=filtered)
    with torch.no_grad():
        for x, n, kwargs in (
            (rows(4), 2, {}),
            (rows(4), 5, {}),
            (rows(4), 5, {"more": 1}),
            (rows(4), 5, {"more": 2}),
            (rows(9), 2, {}),
        ):
            for _ in range(3):
                torch.testing.assert_close(run(x, n, **kwargs), step(x, n, **kwargs))
    assert all(num_kept < num_all / 2 for num_kept, num_all in seen)


def test_weights_of_dynamic_sizes_may_change_them():
    torch._dynamo.reset()
    run = compiled(lambda w, x: x @ w, dynamic=True, cudagraph_mode="FULL")
    with torch.no_grad(), torch._dynamo.config.patch(force_parameter_static_shapes=False):
        for width in (4, 5, 6, 7):
            w = torch.nn.Parameter(rows(4, width))
            x = rows(4, 4)
            for _ in range(3):
                torch.testing.assert_close(run(w, x), x @ w)


@pytest.mark.parametrize("new", [rows(5, WIDTH), rows(4, WIDTH).double()], ids=["shape", "dtype"])
def test_a_buffer_of_another_format_is_refused_where_no_guard_sees_it(new):
    model = torch.nn.Module()
    model.register_buffer("table", rows(4, WIDTH))
    model.forward = lambda x: x @ model.table.T
    options = {"cudagraph_mode": "FULL", "guard_filter_fn": keep_argument_guards_unsafe}
    run = compiled(model, **options)
    kept = model.table
    with torch.no_grad():
        for _ in range(3):
            run(rows(4))
        model.table = new
        with pytest.raises(ConfigError, match=r"table.*was compiled for.* now"):
            run(rows(4))
        model.table = kept
        x = rows(4)
        torch.testing.assert_close(run(x), x @ kept.T)


# --- errors -----------------------------------------------------------------------------------


class BoomError(Exception):
    pass


@pytest.mark.parametrize("at_call", range(4))
@GRAPH_MODES
def test_after_an_error_in_the_middle_of_a_step_the_next_is_right(mode, at_call):
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.toy.hook(torch.ops.toy.hook(x * 2) + 1) * 3

    def explode(_: torch.Tensor) -> None:
        raise BoomError

    run = compiled(function, cudagraph_mode=mode)
    with torch.no_grad():
        for call in range(6):
            x = rows(4)
            if call == at_call:
                toy.hooks.append(explode)
                with pytest.raises(BoomError):
                    run(x)
                toy.hooks.clear()
                assert current_forward_context() is None
            torch.testing.assert_close(run(x), (x * 2 + 1) * 3)
    assert gc.isenabled()


def test_after_an_error_in_its_warm_up_a_key_is_still_captured():
    def explode(_: torch.Tensor) -> None:
        raise BoomError

    run = compiled(lambda x: torch.ops.toy.hook(x * 2) + 1, cudagraph_mode="FULL")
    toy.hooks.append(explode)
    with pytest.raises(BoomError):
        run(rows(4))
    toy.hooks.clear()
    for _ in range(3):
        run(rows(4))
    assert stats(run).total("replays", FULL) > 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cudagraph_mod": "FULL"}, "did you mean cudagraph_mode"),
        ({"cudagraph_mode": "FAST"}, "cudagraph_mode='FAST' is not a mode; use one of NONE"),
        ({"cudagraph_capture_sizes": [8, 4]}, r"must ascend; use \(4, 8\)"),
        ({"splitting_ops": ["my op.f"]}, "is neither an op nor a Python function; write"),
        ({"pass_config": {"enable_async_tp": True}}, "needs enable_sequence_parallelism"),
        ({"use_inductor_graph_partition": True}, "piece_compiler='eager' has no Inductor"),
        ({"strict": True, "cudagraph_mode": "PIECEWISE", "splitting_ops": []}, "nothing is split"),
        ({"describe_batch": lambda _: 4}, "is no BatchDescriptor; return a BatchDescriptor"),
    ],
    ids=[
        *("unknown", "mode", "sizes", "op", "pass", "contradiction", "strict"),
        "descriptor",
    ],
)
def test_wrong_options_say_what_to_do_through_torch_compile(options, text):
    run = compiled(lambda x: attn_new(x * 2), **options)
    with pytest.raises(Exception, match=text):
        run(rows(4))


def test_a_mode_of_torch_compile_is_refused():
    run = torch.compile(lambda x: x * 2, backend="cudagraph_modes", mode="reduce-overhead")
    with pytest.raises(Exception, match="choose by options="):
        run(rows(4))


# --- several models, threads, resets ----------------------------------------------------------


def test_two_threads_run_two_models():
    models = [
        Twin(toy_model("attn_out"), cudagraph_mode="FULL"),
        Twin(toy_model("attn_new"), cudagraph_mode="PIECEWISE"),
    ]
    errors: list[BaseException] = []

    def serve(model: Twin) -> None:
        try:
            for i in range(12):
                model(rows(8 if i % 2 else 4))
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(model.stats.total("replays") for model in models)
    assert gc.isenabled()


@GRAPH_MODES
def test_two_threads_run_one_model(mode):
    """The second call runs whole while the first is in its attention, or waits for it."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return torch.ops.toy.hook(y) + y + x

    run = compiled(function, cudagraph_mode=mode)
    with torch.no_grad():
        for _ in range(3):
            run(rows(4))
    inside, done, results = threading.Event(), threading.Event(), []
    first = threading.get_ident()

    def wait(_: torch.Tensor) -> None:
        if threading.get_ident() == first:
            inside.set()
            done.wait(2)

    def second(x: torch.Tensor) -> None:
        inside.wait(10)
        with torch.no_grad():
            results.append((run(x), x * 5))
        done.set()

    thread = threading.Thread(target=second, args=(rows(4),))
    thread.start()
    toy.hooks.append(wait)
    try:
        x = rows(4)
        with torch.no_grad():
            results.append((run(x), x * 5))
    finally:
        toy.hooks.clear()
        thread.join()
    for actual, expected in results:
        torch.testing.assert_close(actual, expected)


@GRAPH_MODES
def test_a_reset_by_another_thread_waits_for_the_step(mode):
    """It would free memory that the step still reads."""
    run = compiled(lambda x: torch.ops.toy.hook(x * 2) + x, cudagraph_mode=mode)
    resetting, waits = threading.Thread(target=reset, args=(run,)), []

    def start(_: torch.Tensor) -> None:
        toy.hooks.clear()
        resetting.start()
        resetting.join(0.2)
        waits.append(resetting.is_alive())

    with torch.no_grad():
        for _ in range(3):
            run(rows(4))
        toy.hooks.append(start)
        x = rows(4)
        torch.testing.assert_close(run(x), x * 3)
        resetting.join()
        for _ in range(3):
            torch.testing.assert_close(run(x), x * 3)
    assert waits == [True]


def test_reset_drops_graphs_and_keeps_what_was_compiled():
    both = Twin(toy_model(), cudagraph_mode="FULL")
    for _ in range(2):
        for _ in range(3):
            both(rows(4))
        reset(both.compiled)
    assert both.stats.graphs == 1
    assert counts(both.stats, "captures") == {FULL: 2}
    assert counts(both.stats, "warm_ups") == {FULL: 2}


def test_a_reset_of_dynamo_forgets_everything():
    both = Twin(toy_model(), cudagraph_mode="FULL")
    for _ in range(3):
        both(rows(4))
    torch._dynamo.reset()
    assert both.stats.graphs == 0
    for _ in range(3):
        both(rows(4))
    assert counts(both.stats, "captures") == {FULL: 1}


def saved_and_loaded(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def compiled_in_place(model: torch.nn.Module) -> torch.nn.Module:
    model.compile(backend="cudagraph_modes", options=toy.toy_options(cudagraph_mode="FULL"))
    return model


def with_a_compiled_layer(model: torch.nn.Module) -> torch.nn.Module:
    model.layers[1] = compiled(model.layers[1], cudagraph_mode="FULL")
    return model


@pytest.mark.parametrize(
    "copied",
    [lambda model: pickle.loads(pickle.dumps(model)), copy.deepcopy, saved_and_loaded],
    ids=["pickle", "deepcopy", "save"],
)
@pytest.mark.parametrize(
    "compile_with",
    [
        lambda model: compiled(model, cudagraph_mode="FULL"),
        lambda model: compiled(model, cudagraph_mode="PIECEWISE"),
        compiled_in_place,
        with_a_compiled_layer,
    ],
    ids=["FULL", "PIECEWISE", "in place", "layer"],
)
def test_a_model_with_graphs_can_be_copied_and_its_copy_runs(compile_with, copied):
    eager, run = toy_model(), compile_with(toy_model())
    with torch.no_grad():
        for call in (run, run, run, copied(run), run):
            x = rows(4)
            for _ in range(3):
                torch.testing.assert_close(call(x), eager(x))


def test_a_pickled_copy_counts_for_itself():
    run = compiled(toy_model(), cudagraph_mode="FULL")
    with torch.no_grad():
        for _ in range(3):
            run(rows(4))
        other = pickle.loads(pickle.dumps(run))
        assert stats(other).graphs == 0
        for _ in range(5):
            other(rows(4))
    assert (stats(run).total("steps"), stats(other).total("steps")) == (3, 5)


def test_a_backend_of_ones_own_is_pickled_without_what_it_compiled():
    own = CudagraphModesBackend()
    run = torch.compile(toy_model(), backend=own)
    with torch.no_grad():
        run(rows(4))
    assert own.stats(run).graphs == 1
    other = pickle.loads(pickle.dumps(own))
    assert type(other) is CudagraphModesBackend
    assert other.stats(run).graphs == 0


def test_a_model_that_nobody_needs_is_freed():
    model = toy_model()
    weight = weakref.ref(model.head.weight)
    run = compiled(model, cudagraph_mode="FULL")
    with torch.no_grad():
        for _ in range(3):
            run(rows(4))
    del run, model
    gc.collect()
    assert weight() is None


def test_two_equal_models_do_not_take_each_others_graphs():
    twins = [Twin(toy_model(), cudagraph_mode="FULL") for _ in range(2)]
    for _ in range(5):
        for both in twins:
            both(rows(4))
    assert sum(both.stats.total("captures") for both in twins) == 2


def test_target_and_drafter_have_their_own_dispatchers():
    table = rows(16)

    def model(ids: torch.Tensor) -> torch.Tensor:
        return attn_new(torch.nn.functional.embedding(ids.flatten(), table)) + 1

    def drafter(ids: torch.Tensor) -> torch.Tensor:
        return attn_new(torch.nn.functional.embedding(ids.flatten(), table)) + 2

    options: dict[str, Any] = {
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [4, 8],
    }
    target = Twin(model, num_speculative_tokens=3, **options)
    draft = Twin(drafter, num_speculative_tokens=0, **options)
    for _ in range(3):
        target(torch.randint(0, 16, (2, 4)))
        for _ in range(3):
            draft(torch.randint(0, 16, (4, 1)))
    assert counts(target.stats, "replays") == {FULL: 2}
    assert counts(draft.stats, "replays") == {FULL: 8}
    target(torch.randint(0, 16, (8, 1)))
    draft(torch.randint(0, 16, (1, 4)))
    assert counts(target.stats, "steps")[NONE] == 1
    assert counts(draft.stats, "steps")[NONE] == 1


def test_options_used_twice_are_left_as_they_were():
    options = toy.toy_options(cudagraph_mode="FULL")
    before = dict(options)
    runs = [
        torch.compile(toy_model(variant), backend="cudagraph_modes", options=options)
        for variant in ("attn_new", "attn_out")
    ]
    with torch.no_grad():
        for run in runs:
            for _ in range(3):
                run(rows(4))
    assert options == before
    assert [stats(run).total("replays") for run in runs] == [2, 2]


def test_splitting_ops_of_one_model_do_not_reach_another():
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.toy.tally(attn_new(x * 2) + 1) + 1

    splits = [["toy::attn_new"], ["toy::tally"], [], None, ["toy::attn_new", "toy::tally"]]
    found = []
    for names in splits:
        run = compiled(function, splitting_ops=names)
        run(rows(4))
        found.append(stats(run).eager_sections)
    assert found == [1, 1, 0, 0, 2]


# --- contexts given by an engine --------------------------------------------------------------


@pytest.mark.parametrize("own", MODES, ids=lambda mode: mode.name)
def test_every_mode_of_a_step_gives_right_results(own):
    model = toy_model()
    eager, run = copy.deepcopy(model), compiled(model, cudagraph_mode=own.name)
    with torch.no_grad():
        for mode in (NONE, PIECEWISE, FULL) * 3:
            x = rows(8)
            with set_forward_context(
                cudagraph_runtime_mode=mode, batch_descriptor=BatchDescriptor(8, 8)
            ):
                torch.testing.assert_close(run(x), eager(x))


WRONG = [
    (5, BatchDescriptor(8, 8)),
    (6, BatchDescriptor(4, 4)),
    (8, BatchDescriptor(0, 0)),
    (8, BatchDescriptor(99999, 1)),
    (8, BatchDescriptor(8, 2, True)),
    (8, BatchDescriptor(8, 8)),
    (8, BatchDescriptor(8, 8, extra=(5,))),
]


@pytest.mark.parametrize("mode", [PIECEWISE, FULL], ids=lambda mode: mode.name)
def test_descriptors_that_lie_about_sizes_give_right_results(mode):
    model = toy_model()
    eager, run = copy.deepcopy(model), compiled(model, cudagraph_mode=mode.name, dynamic=True)
    with torch.no_grad():
        for _ in range(3):
            for n, batch in WRONG:
                x = rows(n)
                with set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=batch):
                    torch.testing.assert_close(run(x), eager(x))


def test_adapters_have_graphs_of_their_own():
    run = compiled(toy_model(), cudagraph_mode="PIECEWISE")
    with torch.no_grad():
        for has_lora in (False, True) * 3:
            batch = BatchDescriptor(8, 8, has_lora=has_lora, num_active_loras=int(has_lora))
            with set_forward_context(cudagraph_runtime_mode=PIECEWISE, batch_descriptor=batch):
                run(rows(8))
    keys = {(key.has_lora, row.captures) for (_, key), row in stats(run).by_key.items()}
    assert keys == {(False, 3), (True, 3)}


def test_a_batch_may_be_described_by_the_user():
    described: list[Any] = []

    def describe(tensors: Any) -> BatchDescriptor:
        described.append([tuple(t.shape) for t in tensors])
        return BatchDescriptor(8, 4, True)

    both = Twin(
        lambda x: attn_new(x * 2) + 1,
        cudagraph_mode="FULL_DECODE_ONLY",
        describe_batch=describe,
        num_speculative_tokens=1,
        cudagraph_capture_sizes=[8],
    )
    for _ in range(3):
        both(rows(3))
    assert counts(both.stats, "replays") == {FULL: 2}
    assert all(shapes == [(3, WIDTH)] for shapes in described)


# --- Dynamo's limits --------------------------------------------------------------------------


def _limit_warnings(caplog):
    return [r.message for r in caplog.records if "is reached" in r.message]


@pytest.mark.parametrize("limit", ["recompile_limit", "accumulated_recompile_limit"])
def test_a_model_beyond_dynamos_limit_is_told_once(limit, caplog):
    x, models = rows(4), [toy_model() for _ in range(4)]
    compiled_models = [compiled(model, cudagraph_mode="FULL") for model in models]
    with torch.no_grad(), torch._dynamo.config.patch({limit: 2}):
        for _ in range(3):
            for model, run in zip(models, compiled_models, strict=True):
                torch.testing.assert_close(run(x), model(x))
    (message,) = _limit_warnings(caplog)
    assert f"torch._dynamo.config.{limit}=2 is reached" in message
    assert "Dynamo compiled ToyModel.forward" in message
    assert f"raise it before the first call, as by torch._dynamo.config.{limit} = 16" in message
    assert [stats(run).graphs for run in compiled_models] == [1, 1, 0, 0]


@pytest.mark.parametrize("fullgraph", [False, True])
def test_strict_raises_at_dynamos_limit(fullgraph):
    x = rows(4)
    runs = [compiled(toy_model(), fullgraph=fullgraph, strict=True) for _ in range(4)]
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):
        for run in runs[:2]:
            run(x)
        for run in (*runs[2:], *runs[2:]):  # each time, and for each model
            with pytest.raises(ConfigError, match=r"config\.recompile_limit=2 is reached"):
                run(x)
        runs[0](x)
    with torch.no_grad():
        runs[2](x)  # the limit is raised
    assert stats(runs[2]).graphs == 1


def test_calls_that_differ_reach_dynamos_limit(caplog):
    run = compiled(lambda x, k: attn_new(x) * k, dynamic=False)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):
        for num_tokens in (2, 3, 4, 5, 6):
            run(rows(num_tokens), 2)
    assert len(_limit_warnings(caplog)) == 1


@pytest.mark.parametrize("is_object", [False, True])
def test_dynamos_limit_is_told_where_the_first_models_have_another_backend(
    is_object, caplog, monkeypatch
):
    monkeypatch.setattr(torch._dynamo.utils, "_recompile_user_contexts", None)
    if not is_object:
        torch._dynamo.register_backend(cudagraph_modes, name="under another name")
    backend = cudagraph_modes if is_object else "cudagraph_modes"
    x, models = rows(4), [toy_model() for _ in range(3)]
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):
        for model in models[:2]:
            torch.compile(model, backend=lambda graph_module, _: graph_module.forward)(x)
        assert not _limit_warnings(caplog)
        torch.compile(models[2], backend=backend, options=toy.toy_options())(x)
    assert len(_limit_warnings(caplog)) == 1


@pytest.mark.parametrize("is_asked", [False, True])
def test_what_torch_raises_at_dynamos_limit_is_not_told_otherwise(is_asked, caplog):
    x, models = rows(4), [toy_model() for _ in range(3)]
    config = {"recompile_limit": 2, "fail_on_recompile_limit_hit": is_asked}
    with torch.no_grad(), torch._dynamo.config.patch(config):
        for model in models[:2]:
            compiled(model, fullgraph=not is_asked)(x)
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            compiled(models[2], fullgraph=not is_asked)(x)
    assert not _limit_warnings(caplog)


def test_a_limit_of_one_call_is_told_as_that(caplog):
    if "recompile_limit" not in inspect.signature(torch.compile).parameters:
        pytest.skip("torch.compile takes no limit before 2.13")
    run = torch.compile(
        lambda x: x * 2,
        backend="cudagraph_modes",
        options=toy.toy_options(),
        dynamic=False,
        recompile_limit=2,
    )
    with torch.no_grad():
        for num_tokens in (2, 3, 4):
            run(rows(num_tokens))
    (message,) = _limit_warnings(caplog)
    assert "torch.compile(recompile_limit)=2 is reached" in message
    assert "raise it before the first call, as by torch.compile(recompile_limit=16)" in message


def test_limits_of_others_are_theirs(caplog):
    compiled(toy_model())
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(3):
            other = torch.compile(toy_model(), backend=lambda graph, _: graph.forward)
            other(rows(4))
    assert not _limit_warnings(caplog)


def test_a_compilation_inside_of_another_is_not_disturbed():
    compiled(toy_model())  # watches Dynamo from here on
    inner = torch.compile(lambda x: x + 1, backend="eager")

    def backend(graph_module, example_inputs):
        inner(torch.zeros(3))
        return graph_module.forward

    x = rows(4)
    torch.testing.assert_close(torch.compile(lambda x: x * 2, backend=backend)(x), x * 2)
