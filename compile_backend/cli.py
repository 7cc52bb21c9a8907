"""The command line: reads arguments, shows progress and results, turns errors into messages.

Results go to standard output, progress and warnings to standard error. What is done lies in the
modules that it calls.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime as dt
import json
import logging
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from compile_backend.asked_names import check_asked
from compile_backend.bench import command as bench_command
from compile_backend.cache import ArtefactCache, cache_directory, cache_size_bytes
from compile_backend.config import CompilationConfig
from compile_backend.errors import CaptureError, ConfigError
from compile_backend.explain import explain
from compile_backend.explain_html import as_page
from compile_backend.once import WarnOnce
from compile_backend.reports import columns, facts, stats_facts, stats_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.status import Status

    from compile_backend.cache import Entry
    from compile_backend.explanation import Explanation
    from compile_backend.llm.comparison import Comparison
    from compile_backend.llm.loading import LoadedModel

_DEFAULT_OPTIONS = {"cudagraph_mode": "FULL_AND_PIECEWISE"}
_DEFAULT_PROMPT = "What is the capital of France?"

_EXIT_DIFFERENT = 1
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: those of the process if None.

    Returns:
        The exit status: 0; 1 when the compiled answer differs from the eager one, a capture
        failed under `strict`, or something that was to be measured failed; 2 for what was asked
        wrongly.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    parsed = _parser().parse_args(given)
    parsed.given = given
    progress = _Progress(Console(stderr=True))
    command: Callable[[argparse.Namespace, _Progress], int] = parsed.command
    try:
        with progress.showing_logs():
            return command(parsed, progress)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except Exception as error:
        # Dynamo wraps what a backend raises.
        cause = getattr(error, "inner_exception", error)
        if not isinstance(cause, ConfigError | CaptureError):
            raise
        sys.stderr.write(f"{parsed.prog}: {cause}\n")
        return _EXIT_USAGE if isinstance(cause, ConfigError) else _EXIT_DIFFERENT


# --- arguments -------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cudagraph-modes", description="CUDA graph modes for language models."
    )
    parser.set_defaults(prog=parser.prog)
    commands = parser.add_subparsers(title="commands", required=True, metavar="command")
    generate = commands.add_parser(
        "generate",
        help="answer a prompt eagerly and through the backend, and compare",
        description="Answer a prompt greedily, eagerly and through the backend. The exit status "
        "is 1 if the tokens differ.",
    )
    _add_model_arguments(generate)
    generate.add_argument(
        "--max-new-tokens",
        type=int,
        default=64,
        metavar="N",
        help="stop after so many tokens (default: 64)",
    )
    generate.set_defaults(command=_generate)
    explaining = commands.add_parser(
        "explain",
        help="show what would be compiled and captured",
        description="Show what the backend would do with the model, for the call that reads the "
        "prompt and for a decode step. Nothing is compiled or captured.",
    )
    _add_model_arguments(explaining)
    explaining.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write one page on which each graph is drawn, besides what is printed",
    )
    explaining.set_defaults(command=_explain)
    measuring = commands.add_parser(
        "bench",
        help="measure this backend beside its alternatives",
        description="Measure wall and host time of a model's steps, start-up, captures and, if "
        "asked for, growth, with all variants in turn in one process. The exit status is 1 if "
        "something failed; the rest is measured all the same.",
    )
    bench_command.add_arguments(measuring)
    _add_device_argument(measuring)
    _add_options_argument(measuring, "a mode in it stands for --modes")
    _add_json_argument(measuring)
    measuring.set_defaults(command=_bench)
    caching = commands.add_parser(
        "cache",
        help="list or remove compiled pieces on disk",
        description="List the compiled pieces that later processes load, or remove them.",
    )
    caching.add_argument(
        "--cache-dir",
        metavar="DIRECTORY",
        help="what the option cache_dir was set to (default: the user's cache directory)",
    )
    caching.add_argument("--clear", action="store_true", help="remove them all")
    _add_json_argument(caching)
    caching.set_defaults(command=_cache)
    return parser


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="demo",
        help='a model directory, a .gguf file, a hub name, or "demo" (default: demo)',
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt", default=_DEFAULT_PROMPT, help=f'text (default: "{_DEFAULT_PROMPT}")'
    )
    prompt.add_argument(
        "--prompt-ids",
        type=int,
        nargs="+",
        metavar="ID",
        help="token ids instead, for a model without a tokenizer",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of the weights (default: the model's own)",
    )
    _add_device_argument(parser)
    _add_options_argument(parser, "without cudagraph_mode in it, FULL_AND_PIECEWISE is asked for")
    _add_json_argument(parser)


def _add_device_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="auto", help="such as cpu or cuda (default: a GPU if there is one)"
    )


def _add_options_argument(parser: argparse.ArgumentParser, about_mode: str) -> None:
    parser.add_argument(
        "--compilation-config",
        default="{}",
        metavar="JSON",
        help=f"options of the backend as a JSON object; {about_mode}",
    )


def _add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of text and tables"
    )


def _options(parsed: argparse.Namespace, default: Mapping[str, Any]) -> dict[str, Any]:
    """The options for `torch.compile`, checked before anything slow starts."""
    given = parsed.compilation_config
    try:
        options = json.loads(given)
    except ValueError as error:
        raise ConfigError(
            "--compilation-config",
            given,
            f"is not JSON ({error})",
            """write it as '{"cudagraph_mode": "FULL"}'""",
        ) from None
    if isinstance(options, dict):
        options = {**default, **options}
    check_asked(CompilationConfig.from_options(options))
    return dict(options)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            "--device", name, f"cannot be used ({str(error).splitlines()[0]})", "use cpu"
        ) from None


# --- commands --------------------------------------------------------------------------------


def _generate(parsed: argparse.Namespace, progress: _Progress) -> int:
    options = _options(parsed, _DEFAULT_OPTIONS)
    if parsed.max_new_tokens < 1:
        raise ConfigError(
            "--max-new-tokens", parsed.max_new_tokens, "must be positive", "use 1 or more"
        )
    loaded = _load(parsed, progress)
    from compile_backend.llm.comparison import compare_with_eager  # noqa: PLC0415

    comparison = compare_with_eager(
        loaded,
        parsed.prompt_ids or parsed.prompt,
        options=options,
        max_new_tokens=parsed.max_new_tokens,
        phase=progress.phase,
    )
    if parsed.json:
        _print_json(_comparison_dict(parsed, loaded, comparison))
    else:
        _print_comparison(loaded, comparison)
    return 0 if comparison.is_equal else _EXIT_DIFFERENT


def _explain(parsed: argparse.Namespace, progress: _Progress) -> int:
    options = _options(parsed, _DEFAULT_OPTIONS)
    if parsed.html is not None:
        _check_page(parsed.html)
    loaded = _load(parsed, progress)
    from compile_backend.llm.comparison import cache_len_for  # noqa: PLC0415
    from compile_backend.llm.generate import encode_prompt  # noqa: PLC0415

    prompt = parsed.prompt_ids or parsed.prompt
    state = loaded.decode_state(cache_len_for(loaded, prompt, max_new_tokens=1))
    calls = {
        "prefill": lambda: state.prefill_inputs(encode_prompt(loaded, prompt)),
        "decode": state.decode_inputs,
    }
    explanations: dict[str, Explanation] = {}
    for name, inputs in calls.items():
        with progress.phase(f"trace the {name} call"):
            explanations[name] = explain(loaded.model, options=options, dynamic=False, **inputs())
    if parsed.html is not None:
        titles = {f"{name} call of {loaded.name}": told for name, told in explanations.items()}
        _write_page(parsed.html, as_page(titles))
    if parsed.json:
        _print_json({name: told.as_dict() for name, told in explanations.items()})
        return 0
    out = Console()
    for name, told in explanations.items():
        out.rule(f"{name} call of {escape(loaded.name)}")
        out.print(told)
    return 0


def _check_page(path: Path) -> None:
    """Refuse a file that surely cannot be written, before anything takes long."""
    if not path.parent.is_dir():
        fix = "make the directory first, or name another file"
        raise ConfigError("--html", str(path), "is in no directory that exists", fix)
    if path.is_dir():
        raise ConfigError("--html", str(path), "is a directory", "name a file")


def _write_page(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
        raise ConfigError("--html", str(path), problem, "name another file") from error


def _bench(parsed: argparse.Namespace, progress: _Progress) -> int:
    options, device = _options(parsed, {}), _device(parsed.device)
    command = shlex.join((parsed.prog, *parsed.given))
    is_whole = bench_command.run(parsed, options, device, progress, command)
    return 0 if is_whole else _EXIT_DIFFERENT


def _cache(parsed: argparse.Namespace, _progress: _Progress) -> int:
    directory = cache_directory(parsed.cache_dir)
    if directory.parent.exists() and not directory.parent.is_dir():
        fix = "give the directory that the option cache_dir was set to"
        raise ConfigError("--cache-dir", parsed.cache_dir, "is no directory", fix)
    cache = ArtefactCache(directory, cache_size_bytes(), WarnOnce())
    entries = cache.clear() if parsed.clear else cache.entries()
    if parsed.json:
        _print_json(
            {
                "directory": str(cache.directory),
                "removed" if parsed.clear else "count": len(entries),
                "bytes": sum(entry.num_bytes for entry in entries),
                "entries": [_entry_dict(entry) for entry in entries],
            }
        )
    else:
        _print_entries(cache, entries, is_cleared=parsed.clear)
    return 0


def _load(parsed: argparse.Namespace, progress: _Progress) -> LoadedModel:
    device = _device(parsed.device)
    with progress.phase(f"load {parsed.model}"):
        try:
            # All of `llm` needs transformers, which is an optional dependency.
            from transformers.utils import logging as transformers_logging  # noqa: PLC0415

            from compile_backend.llm.loading import load_model  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError(
                "--model",
                parsed.model,
                f"needs a package that is not installed ({error})",
                "run `pip install 'cudagraph-modes[demo]'`",
            ) from None
        # Its bar would be drawn over the spinner.
        transformers_logging.disable_progress_bar()
        return load_model(parsed.model, dtype=parsed.dtype, device=device)


# --- output ----------------------------------------------------------------------------------


class _Progress:
    """What the user sees while waiting.

    Args:
        console: writes to standard error.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Status]:
        """Show that something runs, and then for how long it did."""
        start = time.perf_counter()
        with self._console.status(f"{escape(name)} ...") as status:
            yield status
        self._console.print(f"{escape(name)}: {time.perf_counter() - start:.1f} s")

    @contextlib.contextmanager
    def bar(self, name: str, total: int) -> Iterator[Callable[[], None]]:
        """Show how far something is, and how long it will take; call the context at each step."""
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        is_shown = self._console.is_terminal
        with Progress(
            *columns, console=self._console, transient=True, disable=not is_shown
        ) as progress:
            task = progress.add_task(escape(name), total=total)
            yield lambda: progress.advance(task)

    @contextlib.contextmanager
    def showing_logs(self) -> Iterator[None]:
        """Show what the backend logs, from INFO up."""
        package = logging.getLogger("compile_backend")
        handler, level = _LogLines(self._console), package.level
        package.addHandler(handler)
        package.setLevel(logging.INFO)
        try:
            yield
        finally:
            package.removeHandler(handler)
            package.setLevel(level)


class _LogLines(logging.Handler):
    """Prints log records above a spinner that may be turning."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        style = "yellow" if record.levelno >= logging.WARNING else "dim"
        self._console.print(escape(f"  {record.getMessage()}"), style=style, highlight=False)


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def _entry_dict(entry: Entry) -> dict[str, Any]:
    return {
        "file": entry.path.name,
        "bytes": entry.num_bytes,
        "used": _moment(entry.used),
        **entry.label,
    }


def _moment(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def _print_entries(cache: ArtefactCache, entries: Sequence[Entry], *, is_cleared: bool) -> None:
    out = Console()
    num_bytes = sum(entry.num_bytes for entry in entries)
    pieces = f"{len(entries)} compiled pieces, {num_bytes / 2**20:.1f} MiB"
    text = f"removed {pieces}" if is_cleared else pieces
    out.print(f"{text} in {cache.directory}", markup=False, highlight=False, soft_wrap=True)
    if entries and not is_cleared:
        rows = [
            (
                entry.label.get("model", "?"),
                entry.label.get("piece", "?"),
                entry.label.get("ops", "?"),
                f"{entry.num_bytes / 2**10:.0f} KiB",
                _moment(entry.used),
                entry.path.name[:8],
            )
            for entry in entries
        ]
        out.print(columns("Pieces", ("model", "piece", "ops", "size", "last used", "key"), rows))


def _comparison_dict(
    parsed: argparse.Namespace, loaded: LoadedModel, comparison: Comparison
) -> dict[str, Any]:
    runs = {"eager": comparison.eager, "compiled": comparison.compiled}
    return {
        "model": loaded.name,
        "device": str(loaded.model.device),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "prompt": parsed.prompt_ids or parsed.prompt,
        "text": comparison.compiled.text,
        "tokens_equal": comparison.is_equal,
        "num_equal_tokens": comparison.num_equal_tokens,
        "speedup": comparison.speedup,
        "first_calls_s": comparison.first_calls_s,
        **{
            name: {**dataclasses.asdict(run), "tokens_per_s": run.tokens_per_s}
            for name, run in runs.items()
        },
        "stats": comparison.stats.as_dict(),
    }


def _print_comparison(loaded: LoadedModel, comparison: Comparison) -> None:
    out = Console()
    compiled, device = comparison.compiled, loaded.model.device
    out.print(f"\n{escape(compiled.text or str(list(compiled.token_ids)))}\n", style="bold")
    out.print(stats_keys(comparison.stats.by_key))
    rows = {**stats_facts(comparison.stats), **_comparison_facts(comparison)}
    if device.type != "cuda":
        rows["note"] = (
            f"there are no CUDA graphs on {device.type}: a replay runs the captured code again, "
            "which shows that results are right and saves no time"
        )
    out.print(facts(f"{loaded.name}, {loaded.model.dtype}, {device}", rows))


def _comparison_facts(comparison: Comparison) -> dict[str, object]:
    eager, compiled = comparison.eager, comparison.compiled
    num_tokens = len(eager.token_ids)
    return {
        "first calls": f"{comparison.first_calls_s:.1f} s with tracing, compiling, capturing",
        "prefill": f"{compiled.num_prompt_tokens} tokens in {compiled.prefill_s:.3f} s, "
        f"eager {eager.prefill_s:.3f} s",
        "decode": f"{compiled.tokens_per_s:.1f} tokens/s, eager {eager.tokens_per_s:.1f} "
        f"({comparison.speedup:.2f} x)",
        "greedy tokens": f"all {num_tokens} equal the eager run's"
        if comparison.is_equal
        else f"DIFFER from the eager run's after {comparison.num_equal_tokens} of {num_tokens}",
    }
