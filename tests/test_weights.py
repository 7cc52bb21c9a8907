"""Weights that moved are noticed; weights that changed in place are not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from compile_backend import shortcuts
from compile_backend.weights import Weights

Change = Callable[[torch.nn.Module], object]


class Model(torch.nn.Module):
    """Parameters, buffers and an absent bias, at two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(2)
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.layers[2].weight = self.layers[0].weight  # tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) + self.table


def replaced(module: torch.nn.Module, name: str) -> None:
    weight = getattr(module, name)
    setattr(module, name, torch.nn.Parameter(weight.detach().clone()))


def new_memory(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.clone()


def loaded(model: torch.nn.Module, *, assign: bool) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=assign)


MOVES: dict[str, Change] = {
    "new memory": lambda model: new_memory(model.layers[1].weight),
    "a new parameter": lambda model: replaced(model.layers[1], "weight"),
    "one of two tied": lambda model: replaced(model.layers[2], "weight"),
    "a new buffer": lambda model: setattr(model, "table", torch.ones(2)),
    "a buffer's memory": lambda model: new_memory(model.norm.running_mean),
    "assigned state": lambda model: loaded(model, assign=True),
    "another dtype": lambda model: model.double(),
    "elsewhere": lambda model: model.to("meta"),
    "deleted": lambda model: delattr(model.layers[1], "weight"),
    "set to None": lambda model: setattr(model.layers[1], "weight", None),
    "a buffer set to None": lambda model: setattr(model, "table", None),
    "a parameter made a plain tensor": lambda model: (
        delattr(model.layers[1], "weight"),
        setattr(model.layers[1], "weight", torch.ones(2, 2)),
    ),
    "a bias where there was none": lambda model: setattr(
        model.layers[1], "bias", torch.nn.Parameter(torch.ones(2))
    ),
    "one more": lambda model: model.layers[1].register_parameter(
        "more", torch.nn.Parameter(torch.ones(2))
    ),
    "turned round in place": lambda model: setattr(
        model.layers[1].weight, "data", model.layers[1].weight.data.t()
    ),
    "its own first rows": lambda model: setattr(
        model.layers[1].weight, "data", model.layers[1].weight.data[:1]
    ),
    "more dimensions in place": lambda model: setattr(
        model.layers[1].weight, "data", model.layers[1].weight.data[None, None, None, None, None]
    ),
    "a part of itself": lambda model: setattr(
        model.layers[1].weight, "data", model.layers[1].weight.data[1:]
    ),
}

STAYS: dict[str, Change] = {
    "nothing": lambda model: None,
    "other numbers": lambda model: model.layers[1].weight.data.add_(1),
    "loaded state": lambda model: loaded(model, assign=False),
    "a call": lambda model: model.train()(torch.ones(4, 2)),
    "evaluation": lambda model: model.eval(),
    "no gradients": lambda model: model.requires_grad_(requires_grad=False),
    "the same dtype": lambda model: model.float(),
    "a plain attribute": lambda model: setattr(model, "scratch", torch.ones(2)),
}


@pytest.mark.parametrize("change", MOVES.values(), ids=MOVES)
def test_a_move_is_seen_until_it_is_noted(change: Change) -> None:
    model = Model()
    weights = Weights(model)
    assert not weights.have_moved()
    change(model)
    assert weights.have_moved()
    assert weights.have_moved()
    weights.note()
    assert not weights.have_moved()


@pytest.mark.parametrize("change", STAYS.values(), ids=STAYS)
def test_what_stays_is_not_taken_for_a_move(change: Change) -> None:
    model = Model()
    weights = Weights(model)
    change(model)
    assert not weights.have_moved()


@pytest.mark.parametrize("later", MOVES.values(), ids=MOVES)
def test_moves_are_seen_after_one_was_noted(later: Change) -> None:
    model = Model()
    weights = Weights(model)
    replaced(model.layers[0], "weight")
    weights.note()
    later(model)
    assert weights.have_moved()


class Wrapping(torch.nn.Module):
    """A weight that wraps two others, as a quantized one wraps its numbers and scales."""

    def __init__(self) -> None:
        super().__init__()
        inner = TwoTensor(torch.ones(2, 2), TwoTensor(torch.ones(2, 2), torch.zeros(2, 2)))
        self.weight = torch.nn.Parameter(inner, requires_grad=False)

    def rewrap(self) -> None:
        inner = self.weight
        self.weight = torch.nn.Parameter(TwoTensor(inner.a, inner.b), requires_grad=False)


@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize(
    ("change", "moves"),
    [
        (lambda model: new_memory(model.weight.a), True),
        (lambda model: new_memory(model.weight.b.b), True),
        (lambda model: setattr(model.weight, "a", torch.ones(2, 2)), True),
        (lambda model: setattr(model.weight.b, "a", torch.ones(2, 2)), True),
        (lambda model: model.rewrap(), True),
        (lambda model: model.double(), True),
        (lambda model: model.weight.a.mul_(2), False),
        (lambda model: model.eval(), False),
    ],
    ids=[
        "part",
        "part of a part",
        "new part",
        "new part of a part",
        "wrapped anew",
        "swapped",
        "numbers",
        "-",
    ],
)
def test_tensors_inside_of_a_weight_are_looked_after(
    change: Change, *, moves: bool, is_built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_built:
        monkeypatch.setattr(shortcuts, "watch", lambda *_: None)
    model = Wrapping()
    weights = Weights(model)
    assert (weights._watched is not None) is is_built
    assert not weights.have_moved()
    change(model)
    assert weights.have_moved() is moves
    weights.note()
    assert not weights.have_moved()


def test_tensors_without_an_address_are_looked_after_as_objects() -> None:
    model = torch.nn.Module()
    model.register_buffer("table", torch.eye(2).to_sparse())
    weights = Weights(model)
    assert not weights.have_moved()
    model.table = torch.eye(2).to_sparse()
    assert weights.have_moved()


class WithoutStorage(torch.Tensor):
    """Tells nobody where its storage is."""

    def untyped_storage(self) -> torch.UntypedStorage:
        raise NotImplementedError


def test_a_weight_that_hides_its_storage_is_watched() -> None:
    model = torch.nn.Module()
    model.register_buffer("table", torch.ones(2).as_subclass(WithoutStorage))
    weights = Weights(model)
    assert not weights.have_moved()
    model.table.data = torch.ones(2)
    assert weights.have_moved()


def test_a_weight_that_comes_back_is_watched_once_noted() -> None:
    model = Model()
    model.table = None
    weights = Weights(model)
    model.table = torch.ones(2)
    weights.note()
    model.table = torch.ones(2)
    assert weights.have_moved()


@pytest.mark.parametrize("model", [None, torch.nn.Identity()], ids=["function", "no weights"])
def test_without_weights_nothing_moves(model: torch.nn.Module | None) -> None:
    weights = Weights(model)
    assert not weights.have_moved()
    weights.note()
    assert not weights.have_moved()


@pytest.mark.gpu
@pytest.mark.parametrize("change", MOVES.values(), ids=MOVES)
def test_a_move_is_seen_on_a_gpu(change: Change) -> None:
    """There torch compares all addresses in one call."""
    model = Model().cuda()
    weights = Weights(model)
    assert not weights.have_moved()
    change(model)
    assert weights.have_moved()
    weights.note()
    assert not weights.have_moved()
