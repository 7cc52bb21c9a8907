"""What a runner refuses to be made of: arguments of another kind, and devices without the model.

Pure functions: they know neither graphs nor modes, and nothing of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from compile_backend.distributed import RankAgreement
from compile_backend.errors import ConfigError
from compile_backend.runner_batch import MetadataBuilder
from compile_backend.step_inputs import Dim, InputSpec
from compile_backend.support import AttentionCGSupport

_NAMES = (*MetadataBuilder.__annotations__, *vars(MetadataBuilder))
_BUILDER_MEMBERS = tuple(dict.fromkeys(name for name in _NAMES if not name.startswith("_")))


def check_model(model: object) -> None:
    """Refuse what cannot be called.

    Raises:
        ConfigError: it cannot.
    """
    if not callable(model):
        raise ConfigError("model", model, "cannot be called", "pass a module or a function")


def check_input_spec(input_spec: object) -> None:
    """Refuse what is no list of inputs.

    Raises:
        ConfigError: it is something else, holds something else, or nothing.
    """
    fix = 'use [InputSpec("tokens", (Dim.NUM_TOKENS,), torch.int64)]'
    if isinstance(input_spec, str | Mapping) or not isinstance(input_spec, Sequence):
        raise ConfigError("input_spec", input_spec, "must be a list of InputSpec", fix)
    for spec in input_spec:
        if not isinstance(spec, InputSpec):
            problem = f"holds {type(spec).__name__}, which is no InputSpec"
            raise ConfigError("input_spec", input_spec, problem, fix)
    if not input_spec:
        problem = "is empty, and nothing else tells the model how many tokens a step has"
        raise ConfigError("input_spec", input_spec, problem, fix)


def check_limits(max_num_seqs: int, max_num_batched_tokens: int, query_len: int) -> None:
    """Refuse limits of which one can never be reached, since each request brings tokens.

    Args:
        max_num_seqs: most requests of a batch.
        max_num_batched_tokens: most tokens of a batch.
        query_len: tokens of each request in a uniform decode batch.

    Raises:
        ConfigError: there are fewer tokens than requests, or than one request decodes with.
    """
    if max_num_batched_tokens < max_num_seqs:
        raise ConfigError(
            "max_num_batched_tokens",
            max_num_batched_tokens,
            f"is below max_num_seqs={max_num_seqs}, and so many requests could not even decode "
            "together",
            f"use {max_num_seqs} or more, or lower max_num_seqs",
        )
    if max_num_batched_tokens < query_len:
        raise ConfigError(
            "max_num_batched_tokens",
            max_num_batched_tokens,
            f"is below uniform_decode_query_len={query_len}, and so not one request could decode "
            "with all its guesses",
            f"use {query_len} or more, or fewer guesses (num_speculative_tokens)",
        )


def check_output_shape(output_shape: object) -> None:
    """Refuse what is no row of sizes.

    Raises:
        ConfigError: it is something else, or holds something else.
    """
    fix = "use the leading sizes of what the model returns, such as (Dim.NUM_REQS,)"
    if isinstance(output_shape, str) or not isinstance(output_shape, Sequence):
        raise ConfigError("output_shape", output_shape, "must be a tuple of sizes", fix)
    for size in output_shape:
        if not isinstance(size, Dim) and (type(size) is not int or size < 0):
            problem = f"holds {size!r}, which is neither a Dim nor a number of at least 0"
            raise ConfigError("output_shape", tuple(map(str, output_shape)), problem, fix)


def check_builder(builder: object) -> None:
    """Refuse what makes no attention metadata.

    Raises:
        ConfigError: it is a class, or lacks a member of `MetadataBuilder`.
    """
    if builder is None:
        return
    if isinstance(builder, type):
        fix = f"use {builder.__name__}(...)"
        raise ConfigError("metadata_builder", builder, "is a class", fix)
    missing = [name for name in _BUILDER_MEMBERS if not hasattr(builder, name)]
    if missing:
        raise ConfigError(
            "metadata_builder",
            builder,
            f"is no MetadataBuilder: it has no {', '.join(missing)}",
            "use an AttentionMetadataBuilder, such as paged_model makes, or leave it out",
        )
    support: Any = builder.support  # type: ignore[attr-defined]
    if not isinstance(support, AttentionCGSupport):
        problem = "is no level of support"
        fix = f"use one of AttentionCGSupport: {', '.join(AttentionCGSupport.__members__)}"
        raise ConfigError("metadata_builder.support", support, problem, fix)


def check_ranks(ranks: object) -> None:
    """Refuse what ranks cannot agree by.

    Args:
        ranks: a `RankAgreement`, or None.

    Raises:
        ConfigError: it is something else.
    """
    if ranks is not None and not isinstance(ranks, RankAgreement):
        fix = "use RankAgreement.over(group), or leave it out"
        raise ConfigError("ranks", ranks, "is no RankAgreement", fix)


def found_device(device: object) -> torch.device:
    """The device that is meant, with its index.

    Raises:
        ConfigError: it is none, is not there, or holds no numbers.
    """
    fix = "use the model's, such as 'cpu' or 'cuda:0'"
    if not isinstance(device, str | torch.device):
        raise ConfigError("device", device, "is no device", fix)
    try:
        found = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError("device", str(device), f"cannot be used: {reason}", fix) from None
    if found.type == "meta":
        raise ConfigError("device", str(device), "holds no numbers", fix)
    return found


def check_device(module: torch.nn.Module | None, device: torch.device) -> None:
    """Refuse a device that the model is not on.

    Args:
        module: the model; None for a function, of which nothing is known.
        device: the runner's.

    Raises:
        ConfigError: the model has weights, and none of them is there.
    """
    if module is None:
        return
    held = {str(weight.device) for weight in (*module.parameters(), *module.buffers())}
    if held and str(device) not in held:
        raise ConfigError(
            "device",
            str(device),
            f"holds no weight of the model, which is on {', '.join(sorted(held))}",
            "move the model, or give its device",
        )
