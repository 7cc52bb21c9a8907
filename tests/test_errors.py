"""Errors say what is wrong and what to do, and survive a trip between processes."""

import pickle

import pytest

from compile_backend.config import CUDAGraphMode
from compile_backend.errors import CaptureError, ConfigError, shown


def test_message_names_option_value_problem_and_fix():
    error = ConfigError("capture_sizes", (8, 4), "must ascend", "use (4, 8)")
    assert str(error) == "capture_sizes=(8, 4) must ascend; use (4, 8)"
    assert (error.option, error.value) == ("capture_sizes", (8, 4))
    assert (error.problem, error.fix) == ("must ascend", "use (4, 8)")


def test_strings_are_quoted_and_members_named():
    assert str(ConfigError("debug", "on", "is no choice", "use off")).startswith("debug='on' ")
    error = ConfigError("cudagraph_mode", CUDAGraphMode.FULL_AND_PIECEWISE, "x", "y")
    assert str(error) == "cudagraph_mode=FULL_AND_PIECEWISE x; y"


class Long:
    def __repr__(self) -> str:
        return "several\nlines"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((8, 4), "(8, 4)"),
        ("two\nlines", r"'two\nlines'"),
        (Long(), "<Long>"),
        (tuple(range(51)), str(tuple(range(51)))),
        (list(range(9999)), f"{str(list(range(9999)))[:400]}..."),
        (CUDAGraphMode.FULL, "FULL"),
    ],
    ids=["short", "text", "lines", "sizes", "many", "member"],
)
def test_values_are_shown_in_short(value, text):
    assert shown(value) == text
    assert str(ConfigError("option", value, "x", "y")) == f"option={text} x; y"


def test_config_error_survives_pickling():
    error = ConfigError("max_num_seqs", 0, "is too small", "use 1 or more")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert copy.value == 0


@pytest.mark.parametrize(
    ("error", "base"), [(ConfigError, ValueError), (CaptureError, RuntimeError)]
)
def test_users_can_catch_builtin_errors(error, base):
    assert issubclass(error, base)
