"""Rules that hold over all files: who imports whom, what is exported, what an import starts."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("compile_backend", "passes")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
_NAMES = ("runner.md", "attention-backends.md", "options.md", "how-it-works.md")
PAGES = [ROOT / "docs" / name for name in _NAMES]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
README = ROOT / "README.md"
MAX_LINES = {"serve_prompts.py": 160, "tensor_parallel.py": 100}
"""Of examples that show more than one thing."""

PUBLIC_NAMES = [
    "AttentionCGSupport",
    "Batch",
    "BatchDescriptor",
    "CUDAGraphMode",
    "CUDAGraphWrapper",
    "CaptureError",
    "CompilationConfig",
    "ConfigError",
    "CudagraphDispatcher",
    "Dim",
    "ForwardContext",
    "GraphModelRunner",
    "InputSpec",
    "PassConfig",
    "Resolution",
    "capture",
    "explain",
    "get_forward_context",
    "keep_argument_guards_unsafe",
    "reset",
    "resolve_cudagraph_mode",
    "set_forward_context",
    "stats",
]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def _succeeds(*arguments: str) -> str:
    result = _run(*arguments)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(), filename=str(path)))


def test_import_contracts_hold() -> None:
    _succeeds(
        "-c",
        "import sys; from importlinter.cli import lint_imports;"
        "sys.exit(lint_imports(is_debug_mode=False, show_timings=False))",
    )


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_modules_import_each_other_and_not_the_package(path: Path) -> None:
    """The import contracts see an import of a module; one through the package escapes them."""
    if path.name in ("__init__.py", "__main__.py"):
        return
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            assert not {alias.name for alias in node.names} & set(PACKAGES)
        elif isinstance(node, ast.ImportFrom) and node.module in PACKAGES:
            package = ROOT / node.module
            for alias in node.names:
                assert (package / f"{alias.name}.py").is_file() or (package / alias.name).is_dir()


def test_one_context_variable() -> None:
    made = [
        _name(path)
        for path in SOURCES
        for node in _nodes(path)
        if isinstance(node, ast.Call)
        and (getattr(node.func, "id", None) or getattr(node.func, "attr", None)) == "ContextVar"
    ]
    assert made == ["compile_backend/context.py"]


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_no_global_statement(path: Path) -> None:
    assert not [node for node in _nodes(path) if isinstance(node, ast.Global)]


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_file_names_name_something(path: Path) -> None:
    parts = set(re.split(r"[_.]", path.name))
    assert not parts & {"utils", "util", "common", "helpers", "helper", "misc"}


def test_exported_names() -> None:
    printed = _succeeds(
        "-c",
        "import json, compile_backend as c;"
        "print(json.dumps([c.__all__, [n for n in c.__all__ if not hasattr(c, n)]]))",
    )
    exported, missing = json.loads(printed)
    assert sorted(exported) == sorted(PUBLIC_NAMES)
    assert not missing


def test_import_starts_nothing() -> None:
    printed = _succeeds(
        "-c",
        "import json, sys, compile_backend, torch;"
        "print(json.dumps([torch.cuda.is_initialized(), sorted(sys.modules)]))",
    )
    is_cuda_initialized, modules = json.loads(printed)
    assert not is_cuda_initialized
    assert not {"torch._dynamo", "torch._inductor.compile_fx", "transformers"} & set(modules)


def test_backend_is_found_without_importing_the_package() -> None:
    printed = _succeeds(
        "-c",
        "import sys, torch;"
        "print('cudagraph_modes' in torch.compiler.list_backends(),"
        "'compile_backend' in sys.modules)",
    )
    assert printed.split() == ["True", "False"]


def _blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def test_readme_shows_code() -> None:
    assert _blocks(README)


@pytest.mark.parametrize("number", range(len(_blocks(README))))
def test_readme_block_runs(number: int) -> None:
    _succeeds("-c", _blocks(README)[number])


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_blocks_of_a_page_run_as_one_program(path: Path) -> None:
    _succeeds("-c", "\n".join(_blocks(path)))


@pytest.mark.parametrize("path", [README, *PAGES], ids=_name)
def test_blocks_fit_the_page(path: Path) -> None:
    for line in "".join(_blocks(path)).splitlines():
        assert len(line) < 100, line


@pytest.mark.parametrize("path", EXAMPLES, ids=_name)
def test_example_is_short_and_has_a_main(path: Path) -> None:
    source = path.read_text()
    functions = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    assert "main" in functions
    assert len(source.splitlines()) < MAX_LINES.get(path.name, 60)
