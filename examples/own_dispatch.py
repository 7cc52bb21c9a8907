"""Drive dispatcher and forward context yourself, as an inference engine does."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from compile_backend import (
    BatchDescriptor,
    CompilationConfig,
    CudagraphDispatcher,
    CUDAGraphMode,
    set_forward_context,
    stats,
)

OPTIONS = {
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "cudagraph_capture_sizes": [2, 4, 8],
    "piece_compiler": "eager",  # leave it out to get Inductor's code
}


class Model(torch.nn.Module):
    """Attention between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Every token attends to itself only, so rows of padding change no other row."""
        heads = self.before(x).relu()[:, None]
        return self.after(scaled_dot_product_attention(heads, heads, heads)[:, 0])


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model().eval().to(device)
    compiled = torch.compile(model, backend="cudagraph_modes", options=OPTIONS, dynamic=True)
    dispatcher = CudagraphDispatcher(CompilationConfig.from_options(OPTIONS), max_num_seqs=4)
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE)
    buffer = torch.zeros(16, 16, device=device)
    decode, mixed = BatchDescriptor(3, 3, uniform=True), BatchDescriptor(7, 2)
    for batch in (decode, mixed, decode, mixed, decode, BatchDescriptor(9, 2)):
        mode, key = dispatcher.dispatch(batch)
        buffer[: batch.num_tokens] = torch.randn(batch.num_tokens, 16, device=device)
        context = set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=key)
        with torch.no_grad(), context:
            rows = compiled(buffer[: key.num_tokens])[: batch.num_tokens]
            expected = model(buffer[: batch.num_tokens])
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)
        print(f"{batch.num_tokens} tokens ran at {mode.name} as {key.num_tokens}")
    assert stats(compiled).total("replays", CUDAGraphMode.FULL) == 2


if __name__ == "__main__":
    main()
