"""What a user asks for: the modes, the options, and every check of them.

A config is frozen and holds copies only, so that nothing done to the caller's lists and dicts
later changes it. This file refuses to know models, hardware and what the options lead to: what is
resolved from them lives elsewhere and is never written back.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from numbers import Integral
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from compile_backend.errors import ConfigError, shown
from compile_backend.own_passes import check_entry
from compile_backend.support import AttentionCGSupport

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    _Check = Callable[[str, Any], Any]
    _Owner = TypeVar("_Owner")

MAX_TOKENS = 1 << 20
"""Most tokens of a batch that graphs are made for: tables over all sizes below grow with it."""


class CUDAGraphMode(Enum):
    """How batches run; NONE, PIECEWISE and FULL are also what a single batch runs at.

    The composite modes hold a pair: the mode of uniform decode batches, and that of all others.
    """

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)

    __hash__ = object.__hash__  # that of enumerations is Python, and steps are looked up by modes

    @classmethod
    def parse(cls, value: str | CUDAGraphMode, *, option: str = "cudagraph_mode") -> CUDAGraphMode:
        """The mode that a name (in any case) or a member means.

        Args:
            value: a name or a member.
            option: what the user set to it.

        Raises:
            ConfigError: it means none.
        """
        name = value.strip().upper() if isinstance(value, str) else value
        for mode in cls:
            if name in (mode, mode.name):
                return mode
        names = ", ".join(mode.name for mode in cls)
        raise ConfigError(option, value, "is not a mode", f"use one of {names}")

    @classmethod
    def parse_single(cls, value: str | CUDAGraphMode, *, option: str) -> CUDAGraphMode:
        """The mode of a single batch that a name (in any case) or a member means.

        Args:
            value: a name or a member.
            option: what the user set to it.

        Raises:
            ConfigError: it means none, or a composite one.
        """
        name = value.strip().upper() if isinstance(value, str) else value
        for mode in cls:
            if mode.is_valid_runtime_mode() and name in (mode, mode.name):
                return mode
        fix = "use NONE, PIECEWISE or FULL"
        raise ConfigError(option, value, "is no mode of a single batch", fix)

    def separate_routine(self) -> bool:
        """Whether uniform decode batches and the others have graphs of their own."""
        return isinstance(self.value, tuple)

    def decode_mode(self) -> CUDAGraphMode:
        """What uniform decode batches run at, at best."""
        return CUDAGraphMode(self.value[0]) if isinstance(self.value, tuple) else self

    def mixed_mode(self) -> CUDAGraphMode:
        """What all other batches run at, at best."""
        return CUDAGraphMode(self.value[1]) if isinstance(self.value, tuple) else self

    def has_mode(self, mode: CUDAGraphMode) -> bool:
        """Whether some batches run at `mode`, which is NONE, PIECEWISE or FULL."""
        assert mode.is_valid_runtime_mode(), f"{mode.name} is no mode of a single batch"
        return mode in (self.decode_mode(), self.mixed_mode())

    def has_full_cudagraphs(self) -> bool:
        """Whether some batches run as one graph."""
        return self.has_mode(CUDAGraphMode.FULL)

    def has_piecewise_cudagraphs(self) -> bool:
        """Whether some batches run as one graph for each piece."""
        return self.has_mode(CUDAGraphMode.PIECEWISE)

    def requires_piecewise_compilation(self) -> bool:
        """Whether the model must be split for this mode."""
        return self.has_piecewise_cudagraphs()

    def is_valid_runtime_mode(self) -> bool:
        """Whether a single batch can run at this mode."""
        return not self.separate_routine()


# A check takes an option's name and value, and returns the value in its one normal form.


def _flag(option: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(option, value, "must be a bool", "use True or False")
    return value


def at_least(minimum: int) -> Callable[[str, Any], int]:
    """A check for integers from `minimum` on, those of numpy included."""

    def check(option: str, value: Any) -> int:
        if type(value) is bool or not isinstance(value, Integral):
            raise ConfigError(option, value, "must be an integer", f"use {minimum} or more")
        if value < minimum:
            raise ConfigError(option, value, "is too small", f"use {minimum} or more")
        return int(value)

    return check


def too_many_tokens(option: str, value: object, what: str = "") -> ConfigError:
    """The error for a number of tokens, or of requests, above `MAX_TOKENS`.

    Args:
        option: what the user set.
        value: to this.
        what: follows from it and is too many, as the start of a sentence; the value itself if "".
    """
    problem = f"is more than {MAX_TOKENS}, the most tokens of a batch that graphs are made for"
    fix = f"stay at or below {MAX_TOKENS}; larger batches run without a graph"
    return ConfigError(option, value, f"{what} {problem}".strip(), fix)


def number_of_tokens(minimum: int) -> Callable[[str, Any], int]:
    """A check for integers from `minimum` to `MAX_TOKENS`."""
    check_minimum = at_least(minimum)

    def check(option: str, value: Any) -> int:
        number = check_minimum(option, value)
        if number > MAX_TOKENS:
            raise too_many_tokens(option, value)
        return number

    return check


def _one_of(*choices: str) -> _Check:
    def check(option: str, value: Any) -> str:
        if value not in choices:
            raise ConfigError(option, value, "is no choice", f"use one of {', '.join(choices)}")
        return str(value)

    return check


def _optional(check: _Check) -> _Check:
    return lambda option, value: None if value is None else check(option, value)


def _sizes(option: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(option, value, "must be a list of sizes", "use (4, 8)")
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in value):
        raise ConfigError(option, value, "must hold positive integers only", "use (4, 8)")
    ascending = tuple(sorted(set(value)))
    if tuple(value) != ascending:
        raise ConfigError(option, value, "must ascend", f"use {shown(ascending)}")
    return ascending


def _capture_sizes(option: str, value: Any) -> tuple[int, ...]:
    # Ranges are sequences too, and may be too long to look at.
    if isinstance(value, Sequence) and len(value) > MAX_TOKENS:
        problem = f"holds {len(value)} sizes, but there are only {MAX_TOKENS} below the limit"
        raise ConfigError(option, value, problem, "use a few, such as (1, 2, 4, 8)")
    sizes = _sizes(option, value)
    if sizes and sizes[-1] > MAX_TOKENS:
        raise too_many_tokens(option, value, f"holds {sizes[-1]}, which")
    return sizes


ALL_CAPTURE_SIZES = "cudagraph_capture_sizes"
"""What stands in `compile_sizes` for every capture size."""

TUNED: Mapping[str, Any] = MappingProxyType(
    {
        "coordinate_descent_tuning": True,
        "combo_kernels": True,
        "benchmark_combo_kernel": True,
    }
)
"""What `compile_sizes_config` is by itself. Inductor then multiplies one row by a matrix in a
kernel that it tunes, fused with what is around it, instead of calling a library; and kernels that
do not wait for each other become one where that is measured to be faster."""


def _compile_sizes(option: str, value: Any) -> tuple[int | str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        fix = f"use (1, 8), or ({ALL_CAPTURE_SIZES!r},)"
        raise ConfigError(option, value, "must be a list of sizes", fix)
    names = [size for size in value if isinstance(size, str)]
    if any(name != ALL_CAPTURE_SIZES for name in names):
        fix = f"the one name that it may hold is {ALL_CAPTURE_SIZES!r}"
        raise ConfigError(option, value, "holds a name of no sizes", fix)
    sizes = _sizes(option, [size for size in value if not isinstance(size, str)])
    return (*sizes, ALL_CAPTURE_SIZES) if names else sizes


def _op_names(option: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise ConfigError(option, value, "must be a list of names", f"use ({value!r},)")
    if not isinstance(value, Sequence) or not all(isinstance(n, str) and n for n in value):
        raise ConfigError(option, value, "must be a list of names", "use ('my_library::my_op',)")
    return tuple(value)


def _mapping(option: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(option, value, "must map names to values", "use {'name': value}")
    return MappingProxyType({key: _detached(entry) for key, entry in value.items()})


def _detached(value: Any) -> Any:
    """A copy of nested plain containers; what they hold stays the caller's very objects."""
    if type(value) is dict:
        return {key: _detached(entry) for key, entry in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_detached(entry) for entry in value)
    return value


def _own_passes(option: str, value: Any) -> Mapping[str, Any]:
    entries = _mapping(option, value)
    for name, entry in entries.items():
        check_entry(name, entry)
    return entries


def _levels(option: str, value: Any) -> Mapping[str, AttentionCGSupport]:
    levels = {
        name: AttentionCGSupport.parse(level, option=f"{option}[{name!r}]")
        for name, level in _mapping(option, value).items()
    }
    return MappingProxyType(levels)


def _function_of_one(option: str, value: Any) -> Any:
    if not callable(value):
        raise ConfigError(option, value, "must be callable", "use a function or None")
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # some builtins tell nothing
        return value
    try:
        signature.bind(())
    except TypeError as error:
        fix = "take one argument, the tuple of the call's tensors"
        raise ConfigError(option, value, f"cannot be called with one ({error})", fix) from None
    return value


def _directory(option: str, value: Any) -> str:
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or not path:
        raise ConfigError(option, value, "must name a directory", "use a path or None")
    try:
        is_name = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise ConfigError(option, value, "holds what no path can", "use a path or None")
    return path


def _reject_unknown(options: Mapping[Any, Any], owner: type[Any]) -> None:
    known = [option.name for option in fields(owner)]
    for name, value in options.items():
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            valid = f"{hint}use one of {', '.join(known)}"
            raise ConfigError(str(name), value, "is not an option", valid)


def _refusing_unknown(owner: type[_Owner]) -> type[_Owner]:
    """The class with an `__init__` that answers an unknown option with the close one."""
    initialise = owner.__init__

    @functools.wraps(initialise)
    def checked(self: _Owner, *args: Any, **options: Any) -> None:
        _reject_unknown(options, owner)
        initialise(self, *args, **options)

    owner.__init__ = checked  # type: ignore[method-assign, assignment]
    return owner


@_refusing_unknown
@dataclass(frozen=True, slots=True, kw_only=True)
class PassConfig:
    """Which graph rewrites to run; all are off by default.

    Raises:
        ConfigError: a flag is no bool, or needs another one.
    """

    enable_noop: bool = False
    enable_fusion: bool = False
    enable_attn_fusion: bool = False
    enable_sequence_parallelism: bool = False
    enable_async_tp: bool = False

    def __post_init__(self) -> None:
        for flag in fields(self):
            _flag(flag.name, getattr(self, flag.name))
        if self.enable_async_tp and not self.enable_sequence_parallelism:
            raise ConfigError(
                "enable_async_tp",
                True,
                "needs enable_sequence_parallelism, whose exchanges it spreads over products",
                "set both",
            )


def _pass_config(option: str, value: Any) -> PassConfig:
    if isinstance(value, PassConfig):
        return value
    flags = _mapping(option, value)
    _reject_unknown(flags, PassConfig)
    return PassConfig(**flags)


# The checks of all options but the bools.
_CHECKS: Mapping[str, _Check] = {
    "cudagraph_mode": _optional(lambda _, value: CUDAGraphMode.parse(value)),
    "cudagraph_capture_sizes": _optional(_capture_sizes),
    "max_cudagraph_capture_size": _optional(number_of_tokens(1)),
    "cudagraph_capture": _one_of("lazy", "ahead"),
    # A graph of code that never ran would capture its lazy initialisation.
    "cudagraph_num_of_warmups": at_least(1),
    "splitting_ops": _optional(_op_names),
    "attention_support": _optional(_levels),
    "num_speculative_tokens": number_of_tokens(0),
    "max_num_seqs": number_of_tokens(1),
    "describe_batch": _optional(_function_of_one),
    "piece_compiler": _one_of("inductor", "eager"),
    "inductor_compile_config": _mapping,
    "compile_sizes": _compile_sizes,
    "compile_sizes_config": _mapping,
    "compile_ranges_endpoints": _sizes,
    "pass_config": _pass_config,
    "inductor_passes": _own_passes,
    "cache_dir": _optional(_directory),
    "debug": _one_of("off", "addresses", "verify"),
}


@_refusing_unknown
@dataclass(frozen=True, slots=True, kw_only=True)
class CompilationConfig:
    """The options of the backend, checked.

    Modes and levels may be given by name, tuples as lists, and `pass_config` as a mapping.

    Raises:
        ConfigError: an option is unknown, or holds what it cannot hold.
    """

    cudagraph_mode: CUDAGraphMode | None = None
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    max_cudagraph_capture_size: int | None = None
    cudagraph_capture: str = "lazy"
    pooling: bool = False
    cudagraph_num_of_warmups: int = 1
    cudagraph_copy_inputs: bool = True
    cudagraph_clone_outputs: bool = True
    cudagraph_pad_inputs: bool = False
    cudagraph_specialize_lora: bool = True
    splitting_ops: tuple[str, ...] | None = None
    attention_support: Mapping[str, AttentionCGSupport] | None = None
    num_speculative_tokens: int = 0
    max_num_seqs: int = 256
    describe_batch: Callable[..., Any] | None = None
    piece_compiler: str = "inductor"
    inductor_compile_config: Mapping[str, Any] = field(default_factory=dict)
    compile_sizes: tuple[int | str, ...] = ()
    compile_sizes_config: Mapping[str, Any] = field(default_factory=lambda: dict(TUNED))
    compile_ranges_endpoints: tuple[int, ...] = ()
    use_inductor_graph_partition: bool = False
    pass_config: PassConfig = field(default_factory=PassConfig)
    inductor_passes: Mapping[str, Any] = field(default_factory=dict)
    cache_dir: str | None = None
    disable_cache: bool = False
    strict: bool = False
    debug: str = "off"

    def __post_init__(self) -> None:
        for option in fields(self):
            check: _Check = _CHECKS.get(option.name, _flag)
            object.__setattr__(self, option.name, check(option.name, getattr(self, option.name)))
        if self.compile_sizes_config not in ({}, TUNED) and not self.compile_sizes:
            raise ConfigError(
                "compile_sizes_config",
                dict(self.compile_sizes_config),
                "is for sizes that are compiled by themselves, and compile_sizes names none",
                "name them in compile_sizes, or use inductor_compile_config",
            )
        if self.use_inductor_graph_partition:
            _check_partition(self)
        sizes, maximum = self.cudagraph_capture_sizes, self.max_cudagraph_capture_size
        if sizes is None:
            return
        if not sizes:
            raise ConfigError(
                "cudagraph_capture_sizes", sizes, "is empty", "use cudagraph_mode='NONE'"
            )
        if maximum is not None and maximum != sizes[-1]:
            raise ConfigError(
                "max_cudagraph_capture_size",
                maximum,
                f"is not the largest of cudagraph_capture_sizes={shown(sizes)}",
                f"use {sizes[-1]} or leave it out",
            )

    @property
    def uniform_decode_query_len(self) -> int:
        """Tokens that a decoding request brings to a batch: its last one and the guesses."""
        return 1 + self.num_speculative_tokens

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None = None) -> CompilationConfig:
        """The config that a mapping of options means, such as `options=` of `torch.compile`.

        Raises:
            ConfigError: an option is unknown, or holds what it cannot hold.
        """
        given = {} if options is None else options
        if not isinstance(given, Mapping):
            raise ConfigError("options", given, "must be a mapping", "use {'option': value}")
        _reject_unknown(given, cls)
        return cls(**given)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and deep-copied as plain options: read-only views cannot be."""
        options = {option.name: getattr(self, option.name) for option in fields(self)}
        for name, value in options.items():
            if isinstance(value, MappingProxyType):
                options[name] = dict(value)
        return CompilationConfig.from_options, (options,)


def _check_partition(config: CompilationConfig) -> None:
    """What cannot be had where Inductor compiles the graph as one."""
    for option, problem in (
        ("compile_sizes", "compiles pieces for some sizes"),
        ("compile_ranges_endpoints", "compiles pieces for ranges of sizes"),
        ("piece_compiler", "has no Inductor"),
    ):
        value = getattr(config, option)
        if value and value != "inductor":
            raise ConfigError(
                option,
                value,
                f"{problem}, and with use_inductor_graph_partition Inductor compiles the graph "
                "as one",
                "leave one of the two out",
            )
