"""Every example runs, in this process, and says what it found."""

import importlib
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"

SAID = {
    "compile_a_function": "1 piece, 1 graph captured, 4 replays",
    "huggingface_five_modes": "FULL_AND_PIECEWISE: prompt at PIECEWISE, decode at FULL",
    "own_dispatch": "9 tokens ran at NONE as 9",
    "serve_prompts": "5 prompts served together; the tokens are those of model.generate",
    "own_splitting_op": "FULL becomes FULL_AND_PIECEWISE",
}
# Run by `test_two_ranks`.
OVER_SEVERAL_PROCESSES = ["tensor_parallel"]


def test_each_example_is_known() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(
        [*SAID, *OVER_SEVERAL_PROCESSES]
    )


@pytest.mark.parametrize("name", SAID)
def test_example(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    # Dynamo looks an example's module up by its name.
    monkeypatch.syspath_prepend(EXAMPLES)
    importlib.import_module(name).main()
    assert SAID[name] in capsys.readouterr().out
