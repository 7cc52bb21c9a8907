"""A descriptor has one form for each kind of graph."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_backend.batch import BatchDescriptor, graph_key
from compile_backend.config import CUDAGraphMode

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
