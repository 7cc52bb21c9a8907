"""A descriptor has one form for each kind of graph."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_backend.batch import BatchDescriptor, checked, graph_key
from compile_backend.config import CUDAGraphMode
from compile_backend.errors import ConfigError

descriptors = st.builds(
    BatchDescriptor,
    num_tokens=st.integers(0, 1024),
    num_reqs=st.integers(0, 1024),
    uniform=st.booleans(),
    has_lora=st.booleans(),
    num_active_loras=st.integers(0, 8),
    extra=st.tuples(st.booleans()),
)
runtime_modes = st.sampled_from([m for m in CUDAGraphMode if m.is_valid_runtime_mode()])


def test_fields_and_defaults():
    assert BatchDescriptor(8, 3) == (8, 3, False, False, 0, ())


@given(descriptors)
def test_graphs_of_pieces_depend_on_tokens_adapters_and_extra_only(batch):
    relaxed = batch.relaxed()
    assert relaxed == batch._replace(num_reqs=7, uniform=not batch.uniform).relaxed()
    for name in ("num_tokens", "has_lora", "num_active_loras", "extra"):
        assert getattr(relaxed, name) == getattr(batch, name)


@given(descriptors, runtime_modes)
def test_a_key_is_its_own_key(batch, mode):
    assert graph_key(mode, graph_key(mode, batch)) == graph_key(mode, batch)


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.NONE])
def test_whole_graphs_depend_on_everything(mode):
    batch = BatchDescriptor(12, 3, uniform=True, extra=("flag",))
    assert graph_key(mode, batch) is batch


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_tokens": 4.0}, "num_tokens=4.0 is no integer; use 0 or more"),
        ({"num_reqs": "3"}, "num_reqs='3' is no integer; use 0 or more"),
        ({"num_reqs": True}, "num_reqs=True is no integer; use 0 or more"),
        ({"num_tokens": -1, "num_reqs": 0}, "num_tokens=-1 is too small; use 0 or more"),
        ({"num_reqs": -1}, "num_reqs=-1 is too small; use 0 or more"),
        ({"num_reqs": 5}, "num_reqs=5 is more than num_tokens=4, and every request has at least"),
        ({"uniform": "no"}, "uniform='no' is no bool; use True or False"),
        ({"uniform": 1}, "uniform=1 is no bool; use True or False"),
        ({"uniform": True, "num_reqs": 3}, "uniform=True contradicts num_tokens=4 and num_reqs=3"),
        ({"has_lora": None}, "has_lora=None is no bool; use True or False"),
        ({"num_active_loras": -1}, "num_active_loras=-1 is too small; use 0 or more"),
        ({"num_active_loras": np.array([1, 2])}, "num_active_loras=array"),
        ({"extra": ["flag"]}, "extra=['flag'] is no tuple; use a tuple of hashable values"),
        ({"extra": "flag"}, "extra='flag' is no tuple; use a tuple of hashable values"),
        ({"extra": ([],)}, "extra=([],) cannot be part of a key; use a tuple of hashable values"),
    ],
    ids=str,
)
def test_what_no_batch_can_be_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(BatchDescriptor(**{"num_tokens": 4, "num_reqs": 2, **fields}))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("other", [None, (4, 2), (4, 2, False, False, 0, ()), "batch"])
def test_what_is_no_descriptor_is_named(other: Any) -> None:
    with pytest.raises(ConfigError, match=r"is no BatchDescriptor; pass BatchDescriptor\(num_tok"):
        checked(other)


@given(descriptors)
def test_a_possible_batch_stays_the_very_object(batch):
    is_possible = batch.num_reqs <= batch.num_tokens
    if batch.uniform and batch.num_reqs and batch.num_tokens % batch.num_reqs:
        is_possible = False
    if is_possible:
        assert checked(batch) is batch
    else:
        with pytest.raises(ConfigError):
            checked(batch)


def test_numbers_of_numpy_become_pythons_own():
    held = checked(
        BatchDescriptor(np.int64(4), np.int32(4), np.bool_(True), np.bool_(False), np.int8(0))
    )
    assert held == BatchDescriptor(4, 4, True)
    assert [type(field) for field in held] == [int, int, bool, bool, int, tuple]
