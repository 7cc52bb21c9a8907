"""Capture sizes: ladders, limits, whole requests and padding."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_backend.config import MAX_TOKENS, CompilationConfig
from compile_backend.errors import ConfigError
from compile_backend.sizes import (
    CaptureSizes,
    PaddingTable,
    capture_sizes,
    check_compile_sizes,
    default_ladder,
    listed_sizes,
    ranges_between,
)


def sizes_of(*, max_num_seqs: int = 256, query_len: int = 1, **options: Any) -> CaptureSizes:
    config = CompilationConfig.from_options(options)
    return capture_sizes(config, max_num_seqs=max_num_seqs, query_len=query_len)


explicit_sizes = st.sets(st.integers(1, 96), min_size=1).map(sorted)
size_options = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"max_cudagraph_capture_size": st.integers(1, 600)}),
    st.fixed_dictionaries({"cudagraph_capture_sizes": explicit_sizes}),
)


def test_default_ladder_steps():
    sizes = sizes_of().mixed
    assert sizes == (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
    assert len(sizes) == 51


@pytest.mark.parametrize(
    ("max_num_seqs", "query_len", "largest"),
    [(1, 1, 2), (12, 1, 24), (256, 1, 512), (1024, 1, 512), (8, 3, 48), (32, 17, 512)],
)
def test_default_maximum_is_512_and_at_most_twice_the_largest_decode_batch(
    max_num_seqs, query_len, largest
):
    assert sizes_of(max_num_seqs=max_num_seqs, query_len=query_len).mixed[-1] == largest


@pytest.mark.parametrize("maximum", [1, 3, 42, 257, 300, 512, 1000])
def test_the_maximum_itself_is_captured_even_off_the_ladder(maximum):
    assert sizes_of(max_cudagraph_capture_size=maximum).mixed[-1] == maximum


def test_batches_between_the_ladder_and_max_num_seqs_have_a_graph():
    """12 requests lie between the steps 8 and 16, which may need more requests than allowed."""
    sizes = sizes_of(max_num_seqs=12)
    assert 12 in sizes.mixed
    for num_reqs in (9, 10, 11, 12):
        assert PaddingTable(sizes.uniform).padded(num_reqs) == 12


def test_limits_join_the_default_ladder_below_the_cap_only():
    assert {50, 150} <= set(sizes_of(max_num_seqs=50, query_len=3).mixed)
    assert not {50, 150} & set(
        sizes_of(max_num_seqs=50, query_len=3, max_cudagraph_capture_size=48).mixed
    )


def test_explicit_sizes_are_taken_as_given():
    assert sizes_of(max_num_seqs=12, cudagraph_capture_sizes=[3, 5, 7]).mixed == (3, 5, 7)


def test_speculation_rounds_uniform_sizes_and_leaves_mixed_ones_alone():
    sizes = sizes_of(query_len=4, cudagraph_capture_sizes=[1, 2, 4, 8, 16, 24])
    assert sizes.mixed == (1, 2, 4, 8, 16, 24)
    assert sizes.uniform == (4, 8, 16, 24)


def test_the_largest_speculating_batch_has_a_uniform_size_above_the_default_maximum():
    """32 requests of 17 tokens are 544, more than the default maximum of 512."""
    assert sizes_of(max_num_seqs=32, query_len=17).uniform[-1] == 32 * 17


def test_an_explicit_maximum_binds_uniform_sizes_too():
    sizes = sizes_of(max_num_seqs=32, query_len=17, max_cudagraph_capture_size=512)
    assert sizes.uniform[-1] == 30 * 17
    assert sizes_of(query_len=5, cudagraph_capture_sizes=[1, 24]).uniform == (5, 20)


def test_no_uniform_size_where_one_request_does_not_fit():
    assert sizes_of(query_len=4, cudagraph_capture_sizes=[1, 2]).uniform == ()


def test_reaching_the_largest_decode_batch_adds_few_sizes():
    """Above the ladder, steps count requests: a long query does not multiply the graphs."""
    sizes = sizes_of(max_num_seqs=256, query_len=17)
    assert sizes.uniform[-1] == 256 * 17
    assert len(sizes.uniform) <= 2 * len(default_ladder(256))
    num_reqs = [size // 17 for size in sizes.uniform]
    assert max(b - a for a, b in itertools.pairwise(num_reqs)) == 8


def test_the_default_maximum_binds_decode_batches_of_single_tokens():
    assert sizes_of(max_num_seqs=1024).uniform[-1] == 512


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("max_num_seqs", "query_len"), [(MAX_TOKENS, 2), (2, MAX_TOKENS), (1024, 1025)]
)
def test_decode_batches_too_large_for_tables_are_refused_with_both_numbers(
    max_num_seqs, query_len
):
    with pytest.raises(ConfigError, match=rf"max_num_seqs={max_num_seqs} with {query_len} tokens"):
        sizes_of(max_num_seqs=max_num_seqs, query_len=query_len)
    bound = sizes_of(
        max_num_seqs=max_num_seqs, query_len=query_len, max_cudagraph_capture_size=4096
    )
    assert max(bound.uniform, default=0) <= 4096


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "options",
    [{"max_cudagraph_capture_size": MAX_TOKENS}, {"cudagraph_capture_sizes": [1, MAX_TOKENS]}],
    ids=["maximum", "list"],
)
def test_the_largest_size_of_all_can_be_had(options):
    assert sizes_of(**options).mixed[-1] == MAX_TOKENS


@given(st.integers(1, 300), st.integers(1, 20), size_options)
def test_sizes_ascend_and_uniform_ones_cover_whole_requests(max_num_seqs, query_len, options):
    sizes = sizes_of(max_num_seqs=max_num_seqs, query_len=query_len, **options)
    assert sizes.mixed == tuple(sorted(set(sizes.mixed)))
    assert sizes.uniform == tuple(sorted(set(sizes.uniform)))
    assert all(size % query_len == 0 for size in sizes.uniform)
    reached = max_num_seqs * query_len
    if options or query_len == 1:
        reached = min(reached, sizes.mixed[-1] // query_len * query_len)
    assert max(sizes.uniform, default=0) == reached


@given(st.sets(st.integers(1, 200)), st.integers(-5, 250))
def test_padded_size_is_the_smallest_that_fits(sizes, num_tokens):
    fitting = [size for size in sizes if size >= num_tokens >= 1]
    assert PaddingTable(sizes).padded(num_tokens) == min(fitting, default=None)


def test_nothing_and_one_above_the_maximum_are_not_padded():
    table = PaddingTable((1, 2, 4, 8))
    assert table.padded(0) is None
    assert table.padded(9) is None
    assert table.padded(8) == 8


def test_a_compile_size_that_padding_changes_is_refused_with_the_sizes_that_stay():
    table = PaddingTable(sizes_of(query_len=3, cudagraph_capture_sizes=[1, 2, 4, 8]).uniform)
    with pytest.raises(ConfigError) as caught:
        check_compile_sizes(CompilationConfig(compile_sizes=(1,)), table)
    assert "holds 1, which is padded to 3" in caught.value.problem
    assert "(3, 6)" in caught.value.fix


def test_compile_sizes_that_padding_keeps_are_accepted():
    table = PaddingTable((3, 6))
    check_compile_sizes(CompilationConfig(compile_sizes=(3, 6, 100)), table)
    check_compile_sizes(CompilationConfig(compile_sizes=("cudagraph_capture_sizes",)), table)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ((), ()),
        ((1, 9), (1, 9)),
        (("cudagraph_capture_sizes",), (2, 4)),
        ((1, 4, 9, "cudagraph_capture_sizes"), (1, 2, 4, 9)),
    ],
)
def test_listed_sizes_may_name_all_capture_sizes(written, meant):
    assert listed_sizes(written, {4, 2}) == meant


def test_ranges_end_at_the_endpoints_and_leave_no_gap():
    assert [str(each) for each in ranges_between((1, 8, 9, 64))] == ["1", "2-8", "9", "10-64"]
    assert ranges_between(()) == ()


@given(st.sets(st.integers(1, 200), min_size=1).map(sorted), st.integers(1, 250))
def test_every_size_up_to_the_last_endpoint_is_in_one_range(endpoints, size):
    held = [each for each in ranges_between(endpoints) if each.first <= size <= each.last]
    assert len(held) == (size <= endpoints[-1])
