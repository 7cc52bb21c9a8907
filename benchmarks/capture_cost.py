"""What capturing all default sizes costs, against bare captures of the same work and one size.

Every graph is captured twice in turns: by the engine, and by nothing but `capture_begin` and
`capture_end`. What the runner spends beyond the second is its own; the garbage collection before
the first capture, which looks at every object of the process, stands apart. Memory is taken in
runs without the second captures.

    python benchmarks/capture_cost.py --shape 0.6B --attention flash_attn_3
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import TYPE_CHECKING, Any, Self

import torch

from compile_backend.backend import reset
from compile_backend.bench.fresh_start import give_memory_back
from compile_backend.bench.paged_ways import make_runner, on_paged_cache
from compile_backend.bench.shapes import SHAPES, make_model
from compile_backend.graph_engine import CudaEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compile_backend.runner import GraphModelRunner

MODES = ("PIECEWISE", "FULL", "FULL_AND_PIECEWISE")


class BareCaptures:
    """Captures everything once more.

    Attributes:
        seconds: spent in the bare captures.
        num: how many there were.
        collection_s: spent in garbage collections.
    """

    def __init__(self) -> None:
        self.seconds, self.num, self.collection_s = 0.0, 0, 0.0
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self._graphs: list[Any] = []
        self._original, self._collect = CudaEngine.capture, gc.collect

    def __enter__(self) -> Self:
        bare, original = self, self._original

        def collect(*generation: int) -> int:
            start = time.perf_counter()
            found = bare._collect(*generation)
            bare.collection_s += time.perf_counter() - start
            return found

        def capture(engine: CudaEngine, call: Any, args: Any, trial: Any) -> Any:
            bare.num += 1
            if bare.num % 2:
                bare.capture(call, args)
                return original(engine, call, args, trial)
            captured = original(engine, call, args, trial)
            bare.capture(call, args)
            return captured

        CudaEngine.capture, gc.collect = capture, collect
        return self

    def __exit__(self, *error: object) -> None:
        CudaEngine.capture, gc.collect = self._original, self._collect

    def capture(self, call: Any, args: Sequence[Any]) -> None:
        """Capture a call, with nothing around it."""
        start = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            outputs = call(*args)
            graph.capture_end()
        self.seconds += time.perf_counter() - start
        self._graphs.append((graph, outputs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("tiny", "0.6B", "8B"), default="0.6B")
    parser.add_argument("--attention", default="flash_attn_3")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    shape, device = SHAPES[arguments.shape], torch.device("cuda", 0)
    with torch.no_grad():
        paged = on_paged_cache(make_model(shape, device), shape, arguments.attention)
        compiled = torch.compile(paged.module, backend="cudagraph_modes")

        def prepared(mode: str, sizes: Sequence[int] | None) -> GraphModelRunner:
            reset(compiled)
            give_memory_back(device)
            return make_runner(
                compiled,
                paged,
                mode,
                options={},
                sizes=sizes,
                max_num_seqs=shape.max_num_seqs,
                max_num_tokens=shape.max_num_tokens,
            )

        def captured(mode: str, sizes: Sequence[int] | None) -> GraphModelRunner:
            runner = prepared(mode, sizes)
            runner.capture(progress=False)
            return runner

        print("| mode | graphs | s | ms a graph | bare s | ms a graph | ratio | collection s |")
        print("|---|---|---|---|---|---|---|---|")
        captured(MODES[0], [1])  # compiles
        for _ in range(arguments.rounds):
            for mode in MODES:
                runner = prepared(mode, shape.capture_sizes)
                with BareCaptures() as bare:
                    runner.capture(progress=False)
                ours = sum(runner.report().capture_s.values()) - bare.seconds - bare.collection_s
                times = (ours, ours / bare.num * 1e3, bare.seconds, bare.seconds / bare.num * 1e3)
                ratios = (ours / bare.seconds, bare.collection_s)
                cells = [f"{number:.2f}" for number in (*times, *ratios)]
                print(f"| {mode} | {bare.num} | " + " | ".join(cells) + " |", flush=True)
        print()
        show_memory(captured, shape.capture_sizes)


def show_memory(captured: Any, sizes: Sequence[int] | None) -> None:
    """Of all sizes, and of the largest alone: what torch reserved, and what the device lost."""
    print("| mode | all sizes, MiB | the largest alone, MiB | ratio | device: all | alone |")
    print("|---|---|---|---|---|---|")
    for mode in MODES:
        pool, lost = list[int](), list[int]()
        wanted = sizes
        for _ in range(2):
            captured(mode, [1])
            free = torch.cuda.mem_get_info()[0]
            runner = captured(mode, wanted)
            lost.append(free - torch.cuda.mem_get_info()[0])
            report = runner.report()
            pool.append(sum(report.num_bytes.values()))
            wanted = [max(size for _, size in report.by_size)]
            del runner, report
        mib = [f"{number / 2**20:.0f}" for number in (*pool, *lost)]
        ratio = f"{pool[0] / max(1, pool[1]):.2f}"
        print(f"| {' | '.join((mode, *mib[:2], ratio, *mib[2:]))} |", flush=True)


if __name__ == "__main__":
    main()
