"""What stands for the driver of a device where there is none."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from compile_backend import shortcuts

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


class Driver:
    """Copies and launches at once, on the stream of device 0.

    Attributes:
        device: that is current.
        error: of copies.
        launch_error: of launches.
        capturing: the status of the stream.
        capture_error: of asking for that.
        recorded: events, with their streams.
        launched: what a launch of each executable graph does.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = self.error = self.launch_error = self.capturing = self.capture_error = 0
        self.recorded: list[tuple[int, int]] = []
        self.launched: dict[int, Callable[[], object]] = {}
        of_device = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(ctypes.c_int32))
        of_stream = ctypes.CFUNCTYPE(
            ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)
        )
        copying = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        )
        recording = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        launching = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        asking = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
        current = (of_device(self._current_device), of_stream(self._current_stream))
        copies = (copying(self._copy), recording(self._record))
        launches = (launching(self._launch), asking(self._is_capturing))
        monkeypatch.setattr(shortcuts, "DRIVEN", "cpu")
        # The functions live as long as `self`, which patched functions hold.
        self.functions = (current, copies, launches)
        for name, own in (("copy_functions", copies), ("launch_functions", launches)):
            addresses = [ctypes.cast(each, ctypes.c_void_p).value for each in (*current, *own)]
            monkeypatch.setattr(shortcuts, name, lambda found=addresses, _held=self: found)

    def _current_device(self, device: Any) -> int:
        device[0] = self.device
        return 0

    def _current_stream(self, device: int, stream: Any) -> int:
        stream[0] = 70 + device
        return 0

    def _copy(self, target: int, source: int, num_bytes: int, stream: int) -> int:
        assert stream == 70
        if not self.error:
            ctypes.memmove(target, source, num_bytes)
        return self.error

    def _record(self, event: int, stream: int) -> int:
        self.recorded.append((event, stream))
        return 0

    def _launch(self, executable: int, stream: int) -> int:
        assert stream == 70
        if not self.launch_error:
            self.launched[executable]()
        return self.launch_error

    def _is_capturing(self, stream: int, status: Any) -> int:
        assert stream == 70
        status[0] = self.capturing
        return self.capture_error
