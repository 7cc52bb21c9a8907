"""Callers get memory of their own: copies of results, views of their own inputs."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from toy import FULL, WIDTH, Twin, compiled, rows

from compile_backend import shortcuts
from compile_backend.outputs import Loan, OutputReturns

attn_new = torch.ops.toy.attn_new


def give(
    outputs: list[Any], static_args: list[Any], args: list[Any], *, clone: bool = True
) -> list[Any]:
    return OutputReturns(clone=clone).give("key", outputs, static_args, args)


def test_results_are_copied():
    output = torch.ones(4)
    (returned,) = give([output], [], [])
    output.fill_(9)
    assert returned.tolist() == [1.0] * 4


def test_results_are_handed_on_if_asked():
    output = torch.ones(4)
    assert give([output], [], [], clone=False)[0] is output


def test_constants_are_handed_on():
    assert give([None, 3, "text", 2.5], [], []) == [None, 3, "text", 2.5]


@pytest.mark.parametrize("clone", [True, False])
def test_a_view_of_an_input_views_the_callers(clone):
    static, mine = torch.ones(4, 4), torch.full((4, 4), 2.0)
    (returned,) = give([static[1:].t()], [static], [mine], clone=clone)
    assert returned.data_ptr() == mine[1:].data_ptr()
    torch.testing.assert_close(returned, mine[1:].t())


def test_a_view_of_an_input_at_another_offset_views_the_callers():
    static, mine = torch.ones(4), torch.arange(8.0)[4:]
    (returned,) = give([static[1:]], [static], [mine])
    assert returned.tolist() == [5.0, 6.0, 7.0]


def test_results_in_one_memory_stay_together():
    memory = torch.arange(8.0)
    left, right, whole = give([memory[:4], memory[4:], memory.view(2, 4)], [], [])
    whole.zero_()
    assert not left.any()
    assert not right.any()
    assert memory.any()


def test_an_expanded_result_keeps_its_layout():
    output = torch.ones(1, 4).expand(3, 4)
    (returned,) = give([output], [], [])
    assert returned.stride() == (0, 1)
    torch.testing.assert_close(returned, output)


def test_results_of_several_dtypes_in_one_memory_are_right():
    memory = torch.arange(4.0)
    first, second = give([memory, memory.view(torch.int32)], [], [])
    torch.testing.assert_close(first, memory)
    torch.testing.assert_close(second, memory.view(torch.int32))


@pytest.mark.parametrize("declines", [False, True])
def test_clones_by_the_driver_are_those_of_torch(monkeypatch, declines):
    """Of one output that stays and one that is made anew; `copy_to` stands for the driver."""
    cloned: list[int] = []
    monkeypatch.setattr(shortcuts, "copies_of", lambda pairs: pairs[0][1])

    def copy_to(source: torch.Tensor, address: int) -> bool:
        cloned.append(address)
        if not declines:
            ctypes.memmove(address, source.data_ptr(), source.nbytes)
        return not declines

    monkeypatch.setattr(shortcuts, "copy_to", copy_to)
    returns, stays = OutputReturns(clone=True), torch.arange(6.0).view(2, 3).t()
    kept = []
    for value in range(4):
        stays.fill_(value)
        first, second = returns.give("key", [stays, torch.full((2,), value)], [], [])
        kept.append((value, first, second))
    assert len(cloned) == 3
    for value, first, second in kept:
        assert first.stride() == stays.stride()
        assert first.eq(value).all()
        assert second.eq(value).all()


@pytest.mark.gpu
def test_clones_are_where_their_output_is():
    """Of a graph on a GPU, one of whose outputs is on the host."""
    function = lambda x: (torch.ops.toy.attn_new(x) * 2, torch.arange(3) + 1)  # noqa: E731
    both = Twin(function, cudagraph_mode="FULL")
    for _ in range(6):
        first, second = both(rows(4).cuda())
        assert first.is_cuda
        assert second.device.type == "cpu"


def lent(outputs: list[Any], args: Any = (), returns: Any = None, **told: Any) -> Loan:
    told = {"key": "key", "borrower": 0, "growth": 1, **told}
    returns = returns or OutputReturns(clone=True)
    return returns.lend(told["key"], outputs, args, told["borrower"], told["growth"])


def test_what_is_lent_is_the_same_memory_at_every_step():
    memory = torch.arange(8.0)
    static = torch.ones(3)
    outputs = [torch.ones(4), memory[:4], memory[4:].view(2, 2), static[1:], None, 3]
    outputs.append(torch.ones(1, 4).expand(3, 4))
    loan = lent(outputs, [static])
    first = loan.filled(outputs)
    for value in (2.0, 3.0):
        memory.fill_(value)
        outputs[0].fill_(value)
        again = loan.filled(outputs)
        for one, other, output in zip(again, first, outputs, strict=True):
            assert one is other
            if isinstance(output, torch.Tensor):
                assert one.stride() == output.stride()
                assert torch.equal(one, output)
            else:
                assert one is output
    assert again[3].data_ptr() == static[1:].data_ptr()
    for index in (0, 1, 2, 6):
        assert again[index].data_ptr() != outputs[index].data_ptr()


@pytest.mark.parametrize("expand", [True, False])
def test_what_shares_memory_with_another_dtype_is_lent(expand):
    memory = torch.arange(12.0).view(3, 4)
    other = memory.view(torch.int32)[:, :1]
    outputs = [memory, other.expand(-1, 4) if expand else other]
    loan = lent(outputs)
    for _ in range(3):
        memory.add_(1)
        first, second = loan.filled(outputs)
        assert torch.equal(first, memory)
        assert torch.equal(second, outputs[1])


def test_keys_share_the_memory_of_a_borrower():
    returns = OutputReturns(clone=True)
    small, large = [torch.ones(4)], [torch.full((8,), 2.0)]

    def place(outputs: list[torch.Tensor], key: str, **told: Any) -> int:
        return lent(outputs, key=key, returns=returns, **told).returned[0].data_ptr()

    first = lent(small, key="small", growth=2, returns=returns)  # keeps the memory
    assert place(large, "large") == first.returned[0].data_ptr()
    assert place(large, "large of another", borrower=1) != first.returned[0].data_ptr()
    returns.forget(0)
    assert place(large, "new") != first.returned[0].data_ptr()


def test_outputs_that_are_made_anew_are_not_lent():
    loan = lent([torch.ones(4), 3])
    assert loan.filled([torch.ones(4), 3]) is None


def test_nothing_is_copied_of_what_is_handed_on():
    output = torch.ones(4)
    loan = lent([output, 3], returns=OutputReturns(clone=False))
    for _ in range(2):
        first, second = loan.filled([output, 3])
        assert first is output
        assert second == 3


# --- through the backend ----------------------------------------------------------------------


def same_twice(x: torch.Tensor) -> Any:
    y = attn_new(x * 2) + 1
    return y, y


def the_input(x: torch.Tensor) -> Any:
    return x, attn_new(x * 2) + 1, x


def the_written_input(x: torch.Tensor) -> Any:
    x.mul_(2)
    return attn_new(x) + 1, x, x[1:]


def views_of_the_input(x: torch.Tensor) -> Any:
    return attn_new(x * 2) + 1, x[1:], x.t(), x.view(-1)


def nothing(x: torch.Tensor) -> Any:
    attn_new(x * 2)


def none_and_constants(x: torch.Tensor) -> Any:
    return None, attn_new(x * 2) + 1, 3, x.shape[0], 2.5


def no_dimension(x: torch.Tensor) -> Any:
    return (attn_new(x * 2) + 1).sum(), x.new_empty(0, 3) + 1


def attention_last(x: torch.Tensor) -> Any:
    return attn_new(x * 2)


def attention_output(x: torch.Tensor) -> Any:
    x = x * 2
    out = torch.empty_like(x)
    torch.ops.toy.attn_out(x, out)
    return out


def halves(x: torch.Tensor) -> Any:
    left, right = (attn_new(x * 2) + 1).chunk(2, -1)
    return left, right


def viewed_output(x: torch.Tensor) -> Any:
    x = x * 2
    out = torch.empty_like(x)
    torch.ops.toy.attn_out(x, out)
    return out.view(-1, 2, WIDTH // 2), out


def expanded(x: torch.Tensor) -> Any:
    return (attn_new(x * 2) + 1).sum(0, keepdim=True).expand(4, WIDTH)


def other_dtype(x: torch.Tensor) -> Any:
    return attn_new(x * 2) + 1, x.view(torch.int32)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
@pytest.mark.parametrize(
    "function",
    [
        *(same_twice, the_input, the_written_input, views_of_the_input, nothing),
        *(none_and_constants, no_dimension, attention_last, attention_output, halves),
        *(viewed_output, expanded, other_dtype),
    ],
)
def test_outputs_equal_eagers_and_last(function, mode):
    both = Twin(function, cudagraph_mode=mode)
    earlier = []
    for _ in range(4):
        results = both(rows(4))
        results = results if isinstance(results, tuple) else (results,)
        for kept, values in earlier:
            torch.testing.assert_close(kept, values)
        earlier.append((results, [r.clone() if torch.is_tensor(r) else r for r in results]))


def test_a_callers_write_to_a_result_does_not_reach_the_graph():
    both = Twin(same_twice, cudagraph_mode="FULL")
    for _ in range(4):
        both(rows(4))[0].fill_(7)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_results_not_copied_are_right_until_the_next_call(mode):
    run = compiled(same_twice, cudagraph_mode=mode, cudagraph_clone_outputs=False)
    addresses = []
    with torch.no_grad():
        for _ in range(4):
            x = rows(4)
            actual = run(x)
            torch.testing.assert_close(actual, same_twice(x))
            addresses.append(actual[0].data_ptr())
    assert addresses[2] == addresses[3]


def test_two_modules_do_not_overwrite_what_the_other_returned():
    first = compiled(lambda x: attn_new(x * 2) + 1, cudagraph_clone_outputs=False)
    second = compiled(lambda x: attn_new(x * 3) + 2, cudagraph_clone_outputs=False)
    with torch.no_grad():
        for _ in range(4):
            x = rows(4)
            result = first(x)
            expected = result.clone()
            second(x)
            torch.testing.assert_close(result, expected)


def test_a_loop_that_feeds_a_result_back():
    def function(x: torch.Tensor, state: torch.Tensor) -> Any:
        state = state + attn_new(x)
        return state * 2, state

    for clone in (True, False):
        run = compiled(function, cudagraph_mode="FULL", cudagraph_clone_outputs=clone)
        state, eager_state = torch.zeros(4, WIDTH), torch.zeros(4, WIDTH)
        with torch.no_grad():
            for _ in range(5):
                x = rows(4)
                out, state = run(x, state)
                eager_out, eager_state = function(x, eager_state)
                torch.testing.assert_close((out, state), (eager_out, eager_state))


def test_copies_are_of_the_right_mode():
    both = Twin(same_twice, cudagraph_mode="FULL")
    for _ in range(3):
        both(rows(4))
    assert both.stats.total("replays", FULL) == 2
