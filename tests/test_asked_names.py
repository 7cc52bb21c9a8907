"""What a config asks for by a name that only Inductor or the pipeline knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import compiled, rows, toy_options

from compile_backend import ConfigError, Dim, GraphModelRunner, InputSpec, explain
from compile_backend.asked_names import check_asked
from compile_backend.config import TUNED, CompilationConfig
from compile_backend.torch_internals.inductor_settings import setting_names

REFUSED = [
    (
        {"inductor_compile_config": {"max_autotone": True}},
        r"\{'max_autotone': True\} is no setting of Inductor's; did you mean max_autotune",
    ),
    (
        {"inductor_compile_config": {"max-autotune": True}},
        "is no setting of Inductor's; did you mean max_autotune",
    ),
    ({"inductor_compile_config": {"triton.cudagraph": True}}, r"did you mean triton\.cudagraphs"),
    ({"inductor_compile_config": {"patch": True}}, "is no setting of Inductor's"),
    ({"inductor_compile_config": {"": True}}, "is no setting of Inductor's"),
    (
        {"inductor_compile_config": {"max_autotune": "yes"}},
        r"\{'max_autotune': 'yes'\} holds str, not bool; give it bool",
    ),
    (
        {"compile_sizes": (1,), "compile_sizes_config": {"max_autotone": True}},
        r"compile_sizes_config=\{'max_autotone': True\} is no setting",
    ),
    ({"inductor_passes": {"noop": print}}, "has the name of another pass"),
    ({"inductor_passes": {"mine": "no.such:name"}}, "cannot be found: No module named"),
]


def call(options: dict[str, Any]) -> None:
    with torch.no_grad():
        compiled(lambda x: x + 1, **options)(rows(4))


def make_runner(options: dict[str, Any]) -> None:
    spec = InputSpec("x", (Dim.NUM_TOKENS,), torch.float32)
    GraphModelRunner(lambda x: x, options, input_spec=[spec], max_num_seqs=1, device="cpu")


@pytest.mark.parametrize(("options", "text"), REFUSED, ids=[str(row[0]) for row in REFUSED])
@pytest.mark.parametrize(
    "use",
    [
        call,
        make_runner,
        lambda options: explain(lambda x: x + 1, rows(4), options=toy_options(**options)),
    ],
    ids=["a call", "a runner", "explain"],
)
def test_names_that_nobody_has_are_refused_wherever_they_are_used(
    use: Any, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        use(options)


def _asked(name: str, value: Any) -> CompilationConfig:
    return CompilationConfig(inductor_compile_config={name: value})


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_setting_takes_what_it_holds(data: st.DataObject) -> None:
    import torch._inductor.config as config

    name = data.draw(st.sampled_from(sorted(setting_names())))
    check_asked(_asked(name, getattr(config, name)))
    with pytest.raises(ConfigError, match="is no setting of Inductor's"):
        check_asked(_asked(f"{name}_", 1))


def test_what_is_set_for_listed_sizes_are_settings() -> None:
    check_asked(CompilationConfig(compile_sizes=(1,)))
    assert set(TUNED) <= setting_names()
