"""Which mode a runner asks for, and what it gets: by the model and its attention.

Pure functions that do not log; the rules themselves are those of `resolve`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compile_backend.config import CUDAGraphMode
from compile_backend.errors import ConfigError
from compile_backend.resolve import default_mode, resolve_cudagraph_mode
from compile_backend.support import AttentionCGSupport, lowest

if TYPE_CHECKING:
    from compile_backend.backend import CompiledFacts
    from compile_backend.config import CompilationConfig
    from compile_backend.resolve import Resolution
    from compile_backend.runner_batch import MetadataBuilder

NOT_COMPILED = (
    "was not compiled, since torch.compile handed over nothing of it, and is captured as it is",
    "raise torch._dynamo.config.recompile_limit, or switch compilation on; Dynamo's log tells",
)
"""What is wrong with a model of which Dynamo compiled nothing, and what to do."""


def mode_asked(config: CompilationConfig, compiled: CompiledFacts | None) -> CUDAGraphMode:
    """The mode of the config, or the default.

    Args:
        config: of the runner.
        compiled: what is known of the compiled model; None if it is not compiled.

    Raises:
        ConfigError: the mode needs pieces, and the model is not compiled.
    """
    asked = config.cudagraph_mode
    if compiled is not None:
        return asked or default_mode(piecewise=True, pooling=config.pooling)
    if asked is not None and asked.has_piecewise_cudagraphs():
        raise ConfigError(
            "cudagraph_mode",
            asked.name,
            "needs the pieces of a compiled model, and this one is not compiled with this backend",
            'pass torch.compile(model, backend="cudagraph_modes"), or use FULL or '
            "FULL_DECODE_ONLY",
        )
    return asked or CUDAGraphMode.FULL


def resolve_for_runner(
    asked: CUDAGraphMode,
    config: CompilationConfig,
    compiled: CompiledFacts | None,
    builder: MetadataBuilder | None,
    *,
    uniform_decode_query_len: int,
) -> Resolution:
    """What the mode is lowered to, once the model has been compiled.

    Args:
        asked: the mode.
        config: of the runner.
        compiled: the graphs that Dynamo made; None if the model is not compiled.
        builder: knows the level of the attention backends; None without attention.
        uniform_decode_query_len: tokens of each request in a uniform decode batch.

    Raises:
        ConfigError: with `strict`, when the mode cannot be had, or nothing was compiled.
    """
    support = AttentionCGSupport.ALWAYS if builder is None else builder.support
    if compiled is not None:
        support = lowest((support, compiled.support()))
        if config.strict and not compiled.graphs:
            raise ConfigError("model", "compiled", *NOT_COMPILED)
    return resolve_cudagraph_mode(
        asked,
        support,
        piecewise=compiled is not None and compiled.num_eager_sections() > 0,
        uniform_decode_query_len=uniform_decode_query_len,
        strict=config.strict,
    )
