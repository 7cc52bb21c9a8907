"""How each section runs in a PIECEWISE step: pieces by their graphs, the rest with pinned results.

Every section hands on results at addresses that stay, or the next piece's graph would read stale
memory. Runners read the key from the forward context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compile_backend.context import get_forward_context
from compile_backend.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from compile_backend.batch import BatchDescriptor
    from compile_backend.boundary import Pins
    from compile_backend.graph_engine import StaticGraph
    from compile_backend.wrapper import CUDAGraphWrapper


class UncapturedRunner:
    """Runs an eager section, or a piece that no graph can hold, and pins its results.

    Args:
        call: runs the section on its inputs.
        pins: for its results.
        growth: how many times larger results may be at other keys, by key.
        later: the wrappers of all pieces that run after it.
        direct: by key, what does the same as `call` with less on the host; for replay plans, in
            which all pieces before are replayed.
    """

    def __init__(
        self,
        call: Callable[..., Sequence[Any]],
        pins: Pins,
        growth: Callable[[BatchDescriptor], int],
        later: Sequence[CUDAGraphWrapper],
        direct: Callable[[BatchDescriptor], Callable[..., Sequence[Any]]] | None = None,
    ) -> None:
        self._call = call
        self._direct = direct
        self._pins = pins
        self._growth = growth
        self._later = later

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Run the section; its results are at static addresses."""
        return self.pin(self._call(*args), args)

    def pin(self, results: Sequence[Any], args: Sequence[Any]) -> Sequence[Any]:
        """Bring results to static addresses; graphs that read a moved one are captured again."""
        key = _running_key()
        pinned, has_moved = self._pins.pin(key, results, args, self._growth(key))
        if has_moved:
            for wrapper in self._later:
                wrapper.drop(key)
        return pinned

    def without_running(self, *args: Any) -> Sequence[Any]:
        """The static results of the key's warm-up, for a capture that runs nothing."""
        return self._pins.without_running(_running_key(), args)

    def planned(self, key: BatchDescriptor) -> Callable[..., Sequence[Any]] | None:
        """What runs the section in a replay plan; None where results may come to lie elsewhere."""
        copies = self._pins.plain_copies(key)
        call = self._call if self._direct is None else self._direct(key)
        if not copies:
            return None if copies is None else call

        def run(*args: Any) -> Sequence[Any]:
            results = list(call(*args))
            for position, target in copies:
                assert results[position].shape == target.shape, "shapes are those of the key"
                target.copy_(results[position])
                results[position] = target
            return results

        return run

    def drop(self, key: BatchDescriptor) -> None:
        """Nothing to drop: there is no graph here."""

    def forget(self, key: BatchDescriptor) -> None:
        """Forget one key, which has no graphs any more."""
        self._pins.forget(key)

    def reset(self) -> None:
        """Forget every key."""
        self._pins.reset()


class PieceRunner:
    """Runs a piece through its wrapper.

    Args:
        wrapper: around the piece.
        uncaptured: for the keys whose capture failed.
    """

    def __init__(self, wrapper: CUDAGraphWrapper, uncaptured: UncapturedRunner) -> None:
        self._wrapper = wrapper
        self._uncaptured = uncaptured

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Run the piece: by warm-up, capture, replay, or eagerly once its capture failed."""
        results: Sequence[Any] = self._wrapper(*args)
        if self._wrapper.has_failures and self._wrapper.failure(_running_key()):
            return self._uncaptured.pin(results, args)
        return results

    def without_running(self, *args: Any) -> Sequence[Any]:
        """Capture the piece; its results are what replays will fill.

        Raises:
            CaptureError: it cannot be captured, so pieces after it have no inputs.
        """
        key = _running_key()
        held: Sequence[Any] | None = self._wrapper.outputs(key)
        if held is not None:
            return held
        if self._wrapper.failure(key):
            raise CaptureError(f"a piece before cannot be captured: {self._wrapper.failure(key)}")
        captured: Sequence[Any] = self._wrapper.capture(key, args)
        return captured

    def planned(self, key: BatchDescriptor) -> StaticGraph | None:
        """The graph that runs the piece in a replay plan; None while there is none."""
        return self._wrapper.graph_to_replay(key)

    def drop(self, key: BatchDescriptor) -> None:
        """Drop the piece's graph for one key; the next step captures it again."""
        self._wrapper.drop(key)

    def forget(self, key: BatchDescriptor) -> None:
        """Drop all that is known of one key."""
        self._wrapper.forget(key)
        self._uncaptured.forget(key)

    def reset(self) -> None:
        """Drop the piece's graphs."""
        self._wrapper.reset()
        self._uncaptured.reset()


def _running_key() -> BatchDescriptor:
    key = get_forward_context().batch_descriptor
    assert key is not None, "a PIECEWISE step runs under its key"
    return key
