"""Which of Dynamo's guards to check before each call of a model that does not change.

Guards are most of the host's time in a step with graphs, and nearly all of them look at what only
a change of the model's code or structure would move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def keep_argument_guards_unsafe(guard_entries: Sequence[Any]) -> list[bool]:
    """Keep the guards on what a call brings, and leave out those on the model and its code.

    For `torch.compile`'s own option, which all backends share:
    `options={"guard_filter_fn": keep_argument_guards_unsafe}`. Kept are all guards on arguments
    and what they hold, such as a cache, on closures, and on torch's settings, such as the gradient
    mode. Left out are globals, and modules with all that they hold: parameters, hooks, objects,
    also those that are arguments besides.

    It is unsafe in the sense of torch's filters: after a change to what is left out, such as
    `model.train()`, calls go on as before. Weights with other values are read, also where they
    were replaced, but tied ones stay tied. In steps with graphs, one that lies elsewhere in
    another dtype or shape is refused.

    Args:
        guard_entries: what Dynamo would check.

    Returns:
        For each, whether it is kept.
    """
    filters: Any = torch.compiler
    kept = zip(
        filters.skip_guard_on_all_nn_modules_unsafe(guard_entries),
        filters.skip_guard_on_globals_unsafe(guard_entries),
        strict=True,
    )
    return [is_no_module and is_no_global for is_no_module, is_no_global in kept]
