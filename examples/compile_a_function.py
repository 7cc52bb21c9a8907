"""Compile a function: its first call warms up, the second captures, all later ones replay."""

import torch

import compile_backend


def gated_mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, value = (x @ up).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * value @ down


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    up = torch.randn(32, 128, device=device) / 8
    down = torch.randn(64, 32, device=device) / 8
    compiled = torch.compile(
        gated_mlp, backend="cudagraph_modes", options={"cudagraph_mode": "FULL"}
    )
    with torch.no_grad():
        for _ in range(5):
            # A new tensor at a new address in every step: the backend copies it in.
            x = torch.randn(8, 32, device=device)
            torch.testing.assert_close(
                compiled(x, up, down), gated_mlp(x, up, down), rtol=1e-4, atol=1e-4
            )
    report = compile_backend.stats(compiled)
    captures, replays = report.total("captures"), report.total("replays")
    print(
        f"{report.pieces} piece, {captures} graph captured, {replays} replays: all results equal"
    )
    assert (report.pieces, captures, replays) == (1, 1, 4)


if __name__ == "__main__":
    main()
