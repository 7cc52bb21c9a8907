"""What every test runs under: no network, no thread fights, no GPU tests without a GPU."""

import gc
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from compile_backend.llm.loading import LoadedModel


def pytest_configure() -> None:
    """Set what torch and transformers read once, when a test module first imports them."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["CUDAGRAPH_MODES_CACHE_SIZE_MB"] = "0"  # nothing goes to the user's cache
    if shutil.which("nvidia-smi") is None:  # Triton decides at import: kernels run in Python then
        os.environ["TRITON_INTERPRET"] = "1"
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if num_workers > 1:
        # Each process would otherwise take every core, for its kernels and again for its compiles.
        num_threads = max(1, (os.cpu_count() or 1) // num_workers)
        os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(num_threads))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module")
def one_core() -> Iterator[None]:
    """Threads that wait for each other lose most of their time where cores are shared."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", autouse=True)
def quick_captures() -> Iterator[None]:
    """Captures collect garbage, which takes long where it looks at all that was imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def other_group() -> Iterator[object]:
    """This process is rank 1 of 2 that send nothing; a group of both beside the default one."""
    from rank_graphs import one_of_two_ranks

    with one_of_two_ranks() as group:
        yield group


@pytest.fixture
def without_gradients() -> Iterator[None]:
    """As models are served."""
    import torch

    with torch.no_grad():
        yield


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def loaded(request: pytest.FixtureRequest) -> "Iterator[LoadedModel]":
    """The demo's language model with its real weights, in float32 with full-precision products."""
    import torch

    from compile_backend.llm.loading import DEMO_NAME, DEMO_PACKAGE, load_model

    try:
        importlib.metadata.version(DEMO_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"needs the package {DEMO_PACKAGE}")
    matmul = torch.backends.cuda.matmul
    allowed = matmul.allow_tf32
    matmul.allow_tf32 = False
    yield load_model(DEMO_NAME, dtype=torch.float32, device=request.param)
    matmul.allow_tf32 = allowed


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """What one test compiled is not found by the next."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
