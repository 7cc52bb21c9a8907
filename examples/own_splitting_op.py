"""An op of your own that cuts the graph, and what it declares about full graphs."""

import torch

from compile_backend import CUDAGraphMode, stats
from compile_backend.explain import explain


@torch.library.custom_op("example::running_mean", mutates_args=())
def running_mean(x: torch.Tensor) -> torch.Tensor:
    counts = torch.arange(1, len(x) + 1, device=x.device, dtype=x.dtype)
    return x.cumsum(0) / counts[:, None]


@running_mean.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Model(torch.nn.Module):
    """Equal layers, each ended by the op."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, 16]` to the same."""
        for layer in self.layers:
            x = running_mean(layer(x).relu())
        return x


OPTIONS = {
    "cudagraph_mode": "FULL",
    "splitting_ops": ["example::running_mean"],
    # Without this line the op counts as NEVER, and decode batches get no full graph either.
    "attention_support": {"example::running_mean": "UNIFORM_BATCH"},
    "piece_compiler": "eager",  # leave it out to get Inductor's code
}


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, x = Model().eval().to(device), torch.randn(8, 16, device=device)
    print(explain(model, x, options=OPTIONS))
    compiled = torch.compile(model, backend="cudagraph_modes", options=OPTIONS)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    report = stats(compiled)
    assert report.mode_resolved == ("FULL_AND_PIECEWISE",)
    assert report.total("captures", CUDAGraphMode.PIECEWISE) == report.pieces == 4


if __name__ == "__main__":
    main()
