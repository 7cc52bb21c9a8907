"""Which of Dynamo's guards to check before each call of a model that does not change.

Guards are most of the host's time in a step with graphs, and nearly all of them look at what only
a change of the model's code or structure would move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

# Which attributes an object has of its own, and which function a name stands for.
_OF_CLASSES = frozenset({"CLOSURE_MATCH", "HASATTR", "NOT_PRESENT_IN_GENERIC_DICT"})


def keep_argument_guards_unsafe(guard_entries: Sequence[Any]) -> list[bool]:
    """Keep the guards on what a call brings, and leave out those on the model and its code.

    For `torch.compile`'s own option, which all backends share:
    `options={"guard_filter_fn": keep_argument_guards_unsafe}`. Kept are shapes, dtypes and layouts
    of tensors, numbers and other constants among the arguments and in objects that are arguments,
    such as a cache, and torch's settings, such as the gradient mode. Left out are modules with
    their parameters, hooks and attributes, globals, and which methods a class has.

    It is unsafe in the sense of torch's filters: after a change to what is left out, such as
    `model.train()`, calls go on as before. Weights with other values are read, also where they
    were replaced; in steps with graphs, one of another dtype or shape is refused.

    Args:
        guard_entries: what Dynamo would check.

    Returns:
        For each, whether it is kept.
    """
    filters: Any = torch.compiler
    outside = zip(
        guard_entries,
        filters.skip_guard_on_all_nn_modules_unsafe(guard_entries),
        filters.skip_guard_on_globals_unsafe(guard_entries),
        strict=True,
    )
    return [
        is_no_module
        and is_no_global
        and entry.guard_type not in _OF_CLASSES
        and not entry.name.startswith("dict(type(")
        for entry, is_no_module, is_no_global in outside
    ]
