"""A Hugging Face model in all five modes: what a prompt and a decode step run at in each."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import compile_backend
from compile_backend import CUDAGraphMode

CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval().to(device)
    calls = {
        "prompt": torch.randint(128, (1, 8), device=device),
        "decode": torch.randint(128, (4, 1), device=device),
    }
    for mode in CUDAGraphMode:
        torch.compiler.reset()
        # Pieces are not compiled here, so that the example is quick; leave the option out to get
        # Inductor's code.
        options = {"cudagraph_mode": mode.name, "piece_compiler": "eager"}
        compiled = torch.compile(model, backend="cudagraph_modes", options=options)
        ran_at = {}
        for name, input_ids in calls.items():
            before = runs(compiled)
            with torch.no_grad():
                expected = model(input_ids, use_cache=False).logits
                for _ in range(3):
                    logits = compiled(input_ids, use_cache=False).logits
                    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            ran_at[name] = next(m for m, count in runs(compiled).items() if count > before[m])
        print(f"{mode.name}: {', '.join(f'{n} at {m.name}' for n, m in ran_at.items())}")
        assert ran_at == {"prompt": mode.mixed_mode(), "decode": mode.decode_mode()}


def runs(compiled: torch.nn.Module) -> dict[CUDAGraphMode, int]:
    report = compile_backend.stats(compiled)
    modes = (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
    return {mode: report.total("steps", mode) for mode in modes}


if __name__ == "__main__":
    main()
