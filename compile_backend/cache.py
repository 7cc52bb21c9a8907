"""Artefacts of compiled pieces on disk: one file for each, found by a key.

A file holds code that a later process runs. So the directory is private to its user, files of
anybody else are not opened, and each carries a digest of its contents. Whatever is wrong with a
file or with the directory costs a compilation and a line in the log, never an error. What the
bytes mean, and what makes two pieces equal, is for others to know.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs
from filelock import FileLock, Timeout

from compile_backend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from compile_backend.once import WarnOnce

logger = logging.getLogger(__name__)

SIZE_VARIABLE = "CUDAGRAPH_MODES_CACHE_SIZE_MB"
DEFAULT_SIZE_MB = 2048

_MAGIC = b"cudagraph-modes piece 1\n"
_SUFFIX = ".piece"
_MOST_HEADER_BYTES = 4096
_DIGEST_BYTES = hashlib.sha256().digest_size

# Another process that compiles the same piece is waited for, but not for ever.
_LOCK_TIMEOUT_S = 600.0

# What a process that was killed left behind.
_LEFTOVER_AFTER_S = 3600.0


class NotStorableError(Exception):
    """Why a compiled piece cannot be kept for other processes, as the rest of a sentence."""


def cache_directory(cache_dir: str | None) -> Path:
    """Where artefacts are kept.

    Args:
        cache_dir: the option of that name; None for the user's cache directory, which
            `CUDAGRAPH_MODES_CACHE` moves.

    Raises:
        ConfigError: it begins with a `~` that means nobody's home directory.
    """
    root = (
        cache_dir
        or os.environ.get("CUDAGRAPH_MODES_CACHE")
        or platformdirs.user_cache_dir("cudagraph-modes")
    )
    try:
        directory = Path(root).expanduser()
    except RuntimeError:
        fix = "write the path in full"
        raise ConfigError("cache_dir", root, "is in the home of nobody here", fix) from None
    return directory.absolute() / "pieces"


def cache_size_bytes() -> int:
    """How much may be kept, from the environment; 0 keeps nothing.

    Raises:
        ConfigError: the variable holds no number.
    """
    text = os.environ.get(SIZE_VARIABLE, "").strip() or str(DEFAULT_SIZE_MB)
    if not text.isdecimal():
        raise ConfigError(
            SIZE_VARIABLE,
            text,
            "is no number of megabytes",
            f"use {DEFAULT_SIZE_MB}, or 0 to keep nothing",
        )
    return int(text) * 2**20


@dataclass(frozen=True, slots=True)
class Entry:
    """One artefact, as its file's first lines tell.

    Attributes:
        path: the file.
        num_bytes: its size.
        used: when it was last read or written, in seconds since the epoch.
        label: what it is, for people; empty where the file cannot be read.
    """

    path: Path
    num_bytes: int
    used: float
    label: dict[str, Any]


class ArtefactCache:
    """Files under one directory, the least recently used ones dropped when they grow too many.

    Args:
        directory: made, readable for its user only, when something is kept for the first time.
        max_bytes: the size of all files together.
        warn_once: tells what is wrong with the directory or a file.
    """

    def __init__(self, directory: Path, max_bytes: int, warn_once: WarnOnce) -> None:
        self.directory = directory
        self._max_bytes = max_bytes
        self._warn_once = warn_once

    # --- for the compiler ---

    def find(self, key: str) -> Iterator[tuple[Path, bytes]]:
        """The artefacts kept under a key: files that are whole, and what is in them.

        Several are kept where one graph was compiled under several assumptions.
        """
        if not self._is_private():
            return
        for path in sorted(self._files(self.directory / key[:2])):
            if not path.name.startswith(f"{key}-"):
                continue
            try:
                payload = _payload(_read_own(path))
            except (OSError, _DamagedError) as error:
                self.discard(path, str(error))
                continue
            with contextlib.suppress(OSError):
                os.utime(path)
            yield path, payload

    def keep(self, key: str, variant: str, payload: bytes, label: dict[str, Any]) -> bool:
        """Write an artefact, in one step that others see whole or not at all.

        Args:
            key: what it is found by.
            variant: sets it apart from others under the same key.
            payload: its bytes.
            label: what it is, for people.

        Returns:
            Whether it was written.
        """
        target = self.directory / key[:2] / f"{key}-{variant}{_SUFFIX}"
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_private():
                return False
            target.parent.mkdir(mode=0o700, exist_ok=True)
            _write_in_one_step(target, _file_contents(payload, label))
            self._drop_old()
        except OSError as error:
            self._warn_once(
                logger,
                ("cache", self.directory),
                "compiled pieces cannot be kept in %s, so other processes compile again (%s)",
                self.directory,
                error,
            )
            return False
        return True

    def discard(self, path: Path, reason: str) -> None:
        """Remove an artefact that cannot be used, and say so."""
        self._warn_once(
            logger, ("cache", path), "%s is not used and compiled again: %s", path, reason
        )
        with contextlib.suppress(OSError):
            path.unlink()

    @contextlib.contextmanager
    def lock(self, *keys: str) -> Iterator[None]:
        """Let one process at a time compile what belongs to some keys; the others then find it.

        Where the directory cannot be written to, or somebody holds the lock for too long, the
        body runs without it: then a piece is compiled twice.
        """
        with contextlib.ExitStack() as stack:
            # A file system that cannot lock is told by NotImplementedError.
            with contextlib.suppress(OSError, Timeout, NotImplementedError):
                self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                if self._is_private():
                    locks = self.directory / "locks"
                    locks.mkdir(mode=0o700, exist_ok=True)
                    # In one order everywhere, so that nobody waits for whom he keeps waiting.
                    for name in sorted({key[:2] for key in keys}):
                        lock = FileLock(locks / f"{name}.lock", timeout=_LOCK_TIMEOUT_S)
                        stack.enter_context(lock)
            yield

    # --- for people ---

    def entries(self) -> list[Entry]:
        """All artefacts, the most recently used first."""
        found = []
        for path in self._all_files():
            try:
                status = path.stat()
                label = _label(path)
            except OSError:
                continue
            found.append(Entry(path, status.st_size, status.st_mtime, label))
        return sorted(found, key=lambda entry: -entry.used)

    def clear(self) -> list[Entry]:
        """Remove all artefacts; those that could be removed."""
        removed = []
        for entry in self.entries():
            with contextlib.suppress(OSError):
                entry.path.unlink()
                removed.append(entry)
        return removed

    # --- files ---

    def _is_private(self) -> bool:
        """Whether nobody but this user can have put files into the directory."""
        try:
            status = self.directory.lstat()
        except OSError:
            return False
        problem = _foreign(status) or (None if stat.S_ISDIR(status.st_mode) else "no directory")
        if problem is not None:
            self._warn_once(
                logger,
                ("cache", self.directory),
                "compiled pieces are neither kept in nor read from %s: it is %s",
                self.directory,
                problem,
            )
        return problem is None

    def _all_files(self) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            for directory in sorted(self.directory.iterdir()):
                if len(directory.name) == 2:
                    yield from self._files(directory)

    @staticmethod
    def _files(directory: Path) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            for path in directory.iterdir():
                if path.name.endswith(_SUFFIX):
                    yield path

    def _drop_old(self) -> None:
        """Remove the least recently used files until the rest is small enough."""
        files: list[tuple[float, int, Path]] = []
        for directory in self.directory.iterdir():
            for path in directory.iterdir() if len(directory.name) == 2 else ():
                with contextlib.suppress(OSError):
                    status = path.stat()
                    files.append((status.st_mtime, status.st_size, path))
        too_much = sum(num_bytes for _, num_bytes, _ in files) - self._max_bytes
        now = time.time()
        for used, num_bytes, path in sorted(files):
            is_leftover = path.suffix != _SUFFIX and now - used > _LEFTOVER_AFTER_S
            if is_leftover or (too_much > 0 and path.suffix == _SUFFIX):
                with contextlib.suppress(OSError):
                    path.unlink()
                    too_much -= num_bytes


# --- one file ---
#
# A line that says what it is, a line of JSON for people, a digest of that and the rest, the rest.


class _DamagedError(Exception):
    """What is wrong with a file."""


def _file_contents(payload: bytes, label: dict[str, Any]) -> bytes:
    header = json.dumps(label).encode()[: _MOST_HEADER_BYTES - 1] + b"\n"
    return _MAGIC + header + hashlib.sha256(header + payload).digest() + payload


def _payload(contents: bytes) -> bytes:
    if not contents.startswith(_MAGIC):
        raise _DamagedError("it is of another version")
    end = contents.find(b"\n", len(_MAGIC), len(_MAGIC) + _MOST_HEADER_BYTES) + 1
    header, rest = contents[len(_MAGIC) : end], contents[end:]
    digest, payload = rest[:_DIGEST_BYTES], rest[_DIGEST_BYTES:]
    if not end or hashlib.sha256(header + payload).digest() != digest:
        raise _DamagedError("it is damaged")
    return payload


def _label(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        lines = file.read(len(_MAGIC) + _MOST_HEADER_BYTES).split(b"\n", 2)
    try:
        label = json.loads(lines[1])
    except (IndexError, ValueError):
        return {}
    return label if isinstance(label, dict) else {}


def _foreign(status: os.stat_result) -> str | None:
    """Why what is there may be somebody else's; None if it is this user's alone."""
    if status.st_uid != os.geteuid():
        return "another user's"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "open for others to write to"
    return None


def _read_own(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        problem = _foreign(status) or (None if stat.S_ISREG(status.st_mode) else "no file")
        if problem is not None:
            raise _DamagedError(f"it is {problem}")
        return file.read()


def _write_in_one_step(target: Path, contents: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(contents)
        Path(name).replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
