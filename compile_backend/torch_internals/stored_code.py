"""Inductor's code as bytes, and back in another process."""

from __future__ import annotations

import ast
import contextlib
import copy
import hashlib
import math
import pickle
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from compile_backend.cache import NotStorableError
from compile_backend.torch_internals.extern_kernels import quick_to_import
from compile_backend.torch_internals.replaced import Replaced
from compile_backend.torch_internals.sizes import free_symbols_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from compile_backend.torch_internals.inductor import InnerCode


class Sizes:
    """The free sizes of a graph's inputs, and what may be assumed of them before it is compiled.

    Attributes:
        symints: one for each symbol, in the order in which they are met.
        names: of the symbols.
        ranges: lowest and highest value of each.
    """

    def __init__(self, inputs: Sequence[Any], fake_mode: Any) -> None:
        symbols = [
            symbol
            for value in inputs
            if isinstance(value, (torch.Tensor, torch.SymInt))
            for symbol in sorted(free_symbols_of(value), key=str)
        ]
        self._shape_env = fake_mode.shape_env
        self.symints = [
            self._shape_env.create_symintnode(symbol, hint=None)
            for symbol in dict.fromkeys(symbols)
        ]
        self.names = [symint.node.expr.name for symint in self.symints]
        self.ranges = [self._range(symint.node.expr) for symint in self.symints]

    def _range(self, symbol: Any) -> tuple[float, float]:
        known = self._shape_env.var_to_range[symbol]
        ends = [float(end) if end.is_finite else None for end in (known.lower, known.upper)]
        lower, upper = ends
        return -math.inf if lower is None else lower, math.inf if upper is None else upper

    def assumptions(self) -> str:
        """All that was assumed of the sizes until now, as an expression."""
        if not self.symints:
            return ""
        guards = self._shape_env.get_pruned_guards(self.symints)
        text = self._shape_env.produce_guards_expression(placeholders=self.symints, guards=guards)
        return text or ""

    def allow(self, ranges: Sequence[tuple[float, float]], assumptions: str) -> bool:
        """Whether code made under these assumptions serves; if so they are made here, too."""
        for (lower, upper), (lowest, highest) in zip(self.ranges, ranges, strict=True):
            if lower < lowest or upper > highest:
                return False
        if not assumptions:
            return True
        evaluate = self._shape_env.evaluate_guards_expression
        hints = [symint.node.hint for symint in self.symints]
        # With hints first: what is asked of symbols is assumed from then on.
        return bool(evaluate(assumptions, hints)) and bool(evaluate(assumptions, self.symints))


def packed(
    inner: InnerCode,
    sizes: Sizes,
    assumptions: str,
    mutated: tuple[int, ...],
    *,
    is_direct: bool,
) -> bytes:
    """Compiled code as bytes, with the assumptions that it holds under."""
    from torch._inductor.output_code import CompiledFxGraph

    code = inner.code
    if type(code) is not CompiledFxGraph:
        raise NotStorableError(f"is compiled to a {type(code).__name__}")
    if code.frozen_param_names or code.torchbind_constants:
        raise NotStorableError("holds weights or objects of this process")
    stripped = copy.copy(code)
    stripped.prepare_for_serialization()
    # For people who read logs only.
    stripped.runnable_graph_str = stripped.inductor_post_grad_graph_str = ""
    stripped._fx_graph_cache_debug_lines = None
    stripped.source_code = quick_to_import(code.source_code)
    if stripped.source_code != code.source_code:
        stripped.cache_key = digest(stripped.source_code)
    record = {
        "names": sizes.names,
        "ranges": sizes.ranges,
        "assumptions": assumptions,
        "mutated": mutated,
        "graph": None if is_direct else digest(inner.graph_code),
        "binaries": _cpu_kernels(code),
    }
    try:
        return pickle.dumps((record, _pickled(stripped)))
    except Exception as error:
        raise NotStorableError(f"cannot be written down ({error})") from error


def _pickled(code: Any) -> bytes:
    bundle = code._triton_bundle
    if bundle and bundle.static_autotuners:
        with contextlib.suppress(Exception):
            return pickle.dumps(code)
        # Launchers that were used cannot be pickled, as those that Inductor's own cache gave.
        # It has them unused; without them, kernels are loaded from the binaries beside them.
        code._triton_bundle = _unused_bundle(code) or replace(bundle, static_autotuners=[])
    return pickle.dumps(code)


def _unused_bundle(code: Any) -> Any:
    """The GPU kernels of a piece of code as Inductor's own cache keeps them, if it does."""
    from torch._inductor.codecache import FxGraphCache

    with contextlib.suppress(Exception):
        kept = Path(FxGraphCache._get_tmp_dir_for_key(code._fx_graph_cache_key))
        for path in kept.iterdir():
            found = pickle.loads(path.read_bytes())  # noqa: S301 - Inductor has just done so
            if found.source_code == code.source_code:
                return found._triton_bundle
    return None


def digest(text: str) -> str:
    """A text as a short one that is equal in all processes."""
    return hashlib.sha256(text.encode()).hexdigest()


def revive(code: Any, inputs: Sequence[Any], binaries: Mapping[str, bytes]) -> None:
    """Make code run that was read from bytes."""
    import torch._inductor.debug  # noqa: F401 - what runs code relies on others to import it
    from torch._inductor.async_compile import CompiledTritonKernels
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex
    from torch._inductor.output_code import CompiledFxGraphConstants
    from torch._inductor.triton_bundler import TritonBundler
    from torch._inductor.utils import BoxedBool

    CompiledTritonKernels.cache_clear()  # type: ignore[no-untyped-call]
    if code._triton_bundle:
        TritonBundler.read_and_emit(code._triton_bundle)
        code._triton_bundle = None
    constants = CompiledFxGraphConstants()
    with _CpuKernels.taken_from(binaries):
        code.after_deserialization(constants)
    settings: Any = {
        "cudagraphs": BoxedBool(False),
        "boxed_forward_device_index": BoxedDeviceIndex(None),
        "is_backward": False,
    }
    code.post_compile(inputs, constants, settings)


def _cpu_kernels(code: Any) -> dict[str, bytes]:
    """The compiled C++ kernels of a piece of code, by what they were compiled from."""
    from torch._inductor.codecache import PyCodeCache

    loaded = [m for m in PyCodeCache.modules if getattr(m, "key", None) == code.cache_key]
    if not loaded or "cpp_pybinding" not in code.source_code:
        return {}
    found: dict[str, bytes] = {}
    for statement in ast.parse(code.source_code).body:
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Attribute(attr="cpp_pybinding"), args=[types, source]),
            ):
                library = getattr(getattr(loaded[-1], name, None), "__self__", None)
                path = getattr(library, "__file__", None)
                if path is not None and Path(path).is_file():
                    made_of = ast.literal_eval(types), ast.literal_eval(source)
                    found[digest(repr(made_of))] = Path(path).read_bytes()
    return found


class _CpuKernels:
    """C++ kernels that need no compiler: Inductor is handed them while it loads its code."""

    @classmethod
    @contextlib.contextmanager
    def taken_from(cls, binaries: Mapping[str, bytes]) -> Iterator[None]:
        """Load what the body asks Inductor to compile from `binaries`, where it is in there."""
        from torch._inductor.async_compile import AsyncCompile

        if not binaries:
            yield
            return
        compile_anew = AsyncCompile.cpp_pybinding

        def taken(self: Any, types: list[str], source: str) -> Any:
            name = digest(repr((types, source)))
            if name in binaries:
                return cls._load(name, binaries[name])
            return compile_anew(self, types, source)

        with Replaced(AsyncCompile, "cpp_pybinding", taken):
            yield

    @staticmethod
    def _load(name: str, binary: bytes) -> Any:
        from torch._inductor.codecache import CppPythonBindingsCodeCache
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        # Where Inductor keeps its own: it must be a place that code may run from.
        with tempfile.NamedTemporaryFile(dir=cache_dir(), suffix=".so") as file:
            file.write(binary)
            file.flush()
            library = CppPythonBindingsCodeCache._load_library(file.name, name)
        return getattr(library, CppPythonBindingsCodeCache.entry_function)
