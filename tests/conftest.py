"""What every test runs under: no network, no thread fights, no GPU tests without a GPU."""

import os

# Before torch and transformers are imported, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
_num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _num_workers > 1:
    # Each process would otherwise take every core, for its kernels and again for its compiles.
    _num_threads = max(1, (os.cpu_count() or 1) // _num_workers)
    os.environ.setdefault("OMP_NUM_THREADS", str(_num_threads))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(_num_threads))

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
