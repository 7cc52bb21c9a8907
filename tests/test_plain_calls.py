"""What batch a plain call is; whoever describes batches is checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy import FULL, Twin, compiled, counts, rows

from compile_backend.batch import BatchDescriptor
from compile_backend.errors import ConfigError
from compile_backend.inputs import GraphInput, InputClass
from compile_backend.plain_calls import BatchReader


def reader(*kinds: InputClass, **options: Any) -> BatchReader:
    inputs = [GraphInput(f"input_{i}", f"input_{i}", kind) for i, kind in enumerate(kinds)]
    options = {"query_len": 1, "max_num_seqs": 8, "describe_batch": None, **options}
    return BatchReader(inputs, **options)


def describing(answer: Any) -> BatchReader:
    return reader(InputClass.CALLER, describe_batch=lambda _: answer)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(4, 1, dtype=torch.int64), BatchDescriptor(4, 4, True)),
        (torch.zeros(2, 3, dtype=torch.int32), BatchDescriptor(6, 2, False)),
        (torch.zeros(12, 3), BatchDescriptor(12, 8)),
        (torch.zeros(5, dtype=torch.int64), BatchDescriptor(5, 5)),
        (torch.zeros(()), BatchDescriptor(1, 1)),
    ],
    ids=lambda value: str(tuple(value.shape)) if isinstance(value, torch.Tensor) else "",
)
def test_the_first_tensor_of_the_caller_tells(tensor, expected):
    inputs = (InputClass.PARAMETER, InputClass.CALLER)
    assert reader(*inputs).read([torch.zeros(7), tensor]) == expected


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (4, "is no BatchDescriptor"),
        (None, "is no BatchDescriptor"),
        ((4, 4), "is no BatchDescriptor"),
        (BatchDescriptor(4.0, 4), "num_tokens=4.0 is no integer"),  # type: ignore[arg-type]
        (BatchDescriptor(torch.tensor(4), 4), r"num_tokens=tensor\(4\) is no integer"),  # type: ignore[arg-type]
        (BatchDescriptor(4, True), "num_reqs=True is no integer"),
        (BatchDescriptor(4, 4, 1), "uniform=1 is no bool"),  # type: ignore[arg-type]
        (BatchDescriptor(4, 4, extra=["flag"]), "extra=.* is no tuple"),  # type: ignore[arg-type]
        (BatchDescriptor(4, 5), "num_reqs=5 is more than num_tokens=4"),
        (BatchDescriptor(4, -1), "num_reqs=-1 is too small"),
        (BatchDescriptor(5, 2, uniform=True), "uniform=True contradicts num_tokens=5"),
    ],
    ids=str,
)
def test_an_answer_that_describes_no_batch_is_refused_and_shown(answer, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        describing(answer).read([rows(4)])
    assert caught.value.option == "describe_batch"
    assert caught.value.value is answer
    assert "BatchDescriptor(num_tokens, num_reqs" in caught.value.fix


@pytest.mark.parametrize(
    "answer", [BatchDescriptor(4, 4), BatchDescriptor(0, 0), BatchDescriptor(8, 2, True)]
)
def test_a_batch_is_taken_as_described(answer):
    assert describing(answer).read([rows(4)]) is answer


def test_answers_are_checked_in_every_call():
    answers = [BatchDescriptor(4, 4)]
    run = compiled(lambda x: x * 2, cudagraph_mode="FULL", describe_batch=lambda _: answers[-1])
    for _ in range(3):
        run(rows(4))
    answers.append((4, 4))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"describe_batch=\(4, 4\) is what it returned"):
        run(rows(4))


def test_a_description_that_fails_is_named_in_every_call():
    fails = [True]

    def describe(tensors):
        if fails[-1]:
            raise KeyError("no such batch")
        return BatchDescriptor(4, 4)

    run = compiled(lambda x: x * 2, cudagraph_mode="FULL", describe_batch=describe)
    text = r"describe_batch=<function .*describe.*> failed on 1 tensor: KeyError: 'no such b"
    with torch.no_grad():
        with pytest.raises(ConfigError, match=text):  # while it is compiled
            run(rows(4))
        fails.append(False)
        for _ in range(3):
            run(rows(4))
        fails.append(True)
        with pytest.raises(ConfigError, match=text) as caught:
            run(rows(4))
        assert isinstance(caught.value.__cause__, KeyError)
        fails.append(False)
        run(rows(4))


def test_a_description_may_read_free_sizes():
    both = Twin(
        lambda x: x * 2,
        dynamic=True,
        cudagraph_mode="FULL",
        describe_batch=lambda tensors: BatchDescriptor(tensors[0].shape[0], 1),
    )
    for n in (4, 8) * 3:
        both(rows(n))
    assert counts(both.stats, "replays") == {FULL: 4}
