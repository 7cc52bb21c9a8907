"""Results keep their addresses, key by key, and graphs are told when one does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compile_backend.boundary import Pins, SharedBuffer


def pins(*may_view: bool) -> Pins:
    return Pins([SharedBuffer() for _ in may_view], list(may_view))


# --- shared buffers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(4, 8),
        torch.ones(8, 4).t(),
        torch.ones(1, 8).expand(4, 8),
        torch.ones(4, 16)[:, 3:9],
        torch.ones(4, dtype=torch.int64),
        torch.ones(3, dtype=torch.bool),
        torch.ones(2, 2, dtype=torch.complex64),
        torch.tensor(3.0),
        torch.empty(0, 4),
        torch.ones(2, 3, 4).permute(2, 0, 1),
    ],
    ids=["rows", "columns", "expanded", "gap", "ints", "bools", "complex", "0-d", "empty", "3-d"],
)
def test_a_buffer_takes_any_layout(tensor):
    like = SharedBuffer().like(tensor)
    assert (like.shape, like.stride(), like.dtype) == (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )


def test_sizes_take_turns_in_one_memory():
    buffer = SharedBuffer()
    large, small = buffer.like(torch.ones(8)), buffer.like(torch.ones(2))
    assert large.data_ptr() == small.data_ptr()
    assert buffer.num_bytes == 32


def test_memory_grows_once_if_told_how_far():
    buffer = SharedBuffer()
    small = buffer.like(torch.ones(2), growth=4)
    assert buffer.like(torch.ones(8)).data_ptr() == small.data_ptr()


def test_what_was_made_before_memory_grew_keeps_the_old():
    buffer = SharedBuffer()
    small = buffer.like(torch.ones(2)).fill_(7)
    buffer.like(torch.ones(800)).fill_(1)
    assert small.tolist() == [7.0, 7.0]


def test_each_device_has_memory_of_its_own():
    """A value on the host, in a piece that no graph holds, is no value on the device."""
    buffer = SharedBuffer()
    there = buffer.like(torch.ones(8, device="meta"))
    here = buffer.like(torch.ones(2))
    assert (there.device.type, here.device.type) == ("meta", "cpu")
    assert buffer.num_bytes == 32 + 8
    assert buffer.like(torch.ones(2)).data_ptr() == here.data_ptr()


def test_results_are_pinned_where_they_are():
    results = [torch.ones(2, 3), torch.ones(4, device="meta")]
    pinned, _ = pins(False, False).pin("key", results, [])
    assert [tensor.device.type for tensor in pinned] == ["cpu", "meta"]


def test_buffers_made_under_inference_mode_can_be_written_outside_of_it():
    buffer = SharedBuffer()
    with torch.inference_mode():
        made = buffer.like(torch.ones(4))
    assert not made.is_inference()
    made.fill_(3)


# --- pins -------------------------------------------------------------------------------------


def test_results_are_copied_to_one_address():
    held = pins(False)
    addresses = set()
    for value in (1.0, 2.0, 3.0):
        (pinned,), has_moved = held.pin("key", [torch.full((4,), value)], [])
        assert pinned.tolist() == [value] * 4
        assert not has_moved
        addresses.add(pinned.data_ptr())
    assert len(addresses) == 1


def test_constants_are_handed_on():
    results, _ = pins(False, False, False).pin("key", [torch.ones(1), None, 7], [])
    assert results[1:] == [None, 7]


def test_a_view_of_an_argument_is_handed_on_as_it_is():
    held, argument = pins(True), torch.ones(4, 4)
    for _ in range(3):
        (pinned,), has_moved = held.pin("key", [argument[1:].t()], [argument])
        assert pinned.data_ptr() == argument[1:].data_ptr()
        assert not has_moved


def test_a_view_that_moved_is_told():
    held = pins(True)
    moves = [held.pin("key", [x[1:]], [x])[1] for x in (torch.ones(4), torch.ones(4))]
    assert moves == [False, True]


def test_a_view_that_keeps_moving_still_shares_memory():
    held, kept = pins(True), []
    for _ in range(6):
        x = torch.ones(4)
        kept.append(x)
        (pinned,), _ = held.pin("key", [x[1:]], [x])
        pinned.add_(1)
        assert x.tolist() == [1.0, 2.0, 2.0, 2.0]


def test_results_in_one_memory_still_share_it():
    held, made = pins(False, False), torch.ones(4, 4)
    (one, other), _ = held.pin("key", [made, made.t()], [])
    one[0].fill_(5)
    assert other[:, 0].eq(5).all()


def test_a_result_may_have_another_size_each_time():
    held = pins(False)
    for n in (3, 5, 2):
        (pinned,), _ = held.pin("key", [torch.ones(n)], [])
        assert pinned.shape == (n,)


def test_an_expanded_result_is_pinned():
    held = pins(False)
    for value in (1.0, 2.0):
        (pinned,), _ = held.pin("key", [torch.full((1,), value).expand(4)], [])
        assert pinned.tolist() == [value] * 4


def test_an_empty_result_is_pinned():
    (pinned,), _ = pins(False).pin("key", [torch.empty(0, 4)], [])
    assert pinned.shape == (0, 4)


def test_keys_take_turns():
    held = pins(False)
    for value in (1.0, 2.0):
        for n in (8, 4):
            (pinned,), _ = held.pin(n, [torch.full((n,), value)], [], 1)
            assert pinned.tolist() == [value] * n


def test_last_results_are_there_without_running():
    held, argument = pins(False, True), torch.ones(4)
    (copied, _), _ = held.pin("key", [torch.ones(2), argument[2:]], [argument])
    moved = torch.full((4,), 5.0)
    results: Any = held.without_running("key", [moved])
    assert results[0].data_ptr() == copied.data_ptr()
    assert results[1].data_ptr() == moved[2:].data_ptr()


def test_reset_forgets():
    held = pins(True)
    x, y = torch.ones(4), torch.ones(4)
    held.pin("key", [x], [x])
    held.reset()
    assert held.pin("key", [y], [y])[1] is False
    held.reset()
    with pytest.raises(KeyError):
        held.without_running("key", [])
