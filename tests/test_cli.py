"""The command line on a tiny random model: results, exit status, and what goes to which stream."""

import json
import logging
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from compile_backend.cache import ArtefactCache, cache_directory
from compile_backend.cli import main
from compile_backend.errors import ConfigError
from compile_backend.llm import comparison
from compile_backend.llm.comparison import Comparison
from compile_backend.llm.generate import Generation
from compile_backend.once import WarnOnce
from compile_backend.stats import Report

EAGER_PIECES = {"piece_compiler": "eager"}
PROMPT = "what is this what is this what is"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights and tokenizer of a two-layer Llama, as `save_pretrained` leaves them."""
    directory = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)
    words = {"[UNK]": 0, "what": 1, "is": 2, "this": 3}
    words |= {f"word{number}": number for number in range(4, 64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(
        directory
    )
    return directory


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch.compiler.reset()


def _arguments(
    command: str, model: Path | str, config: dict[str, Any] | str | None = None, *more: str
) -> list[str]:
    text = config if isinstance(config, str) else json.dumps({**EAGER_PIECES, **(config or {})})
    given = [command, "--model", str(model), "--device", "cpu", "--compilation-config", text]
    return [*given, *more]


def _generate_json(
    capsys: pytest.CaptureFixture[str], model: Path, config: dict[str, Any], *more: str
) -> dict[str, Any]:
    arguments = _arguments("generate", model, config, "--max-new-tokens", "6", "--json", *more)
    assert main(arguments) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def _count(told: dict[str, Any], counted: str, mode: str) -> int:
    rows = told["stats"]["by_key"]
    return sum(row[counted] for row in rows if row["mode"] == mode)


def test_generate_shows_text_and_counts(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--prompt", PROMPT, "--max-new-tokens", "6")
    assert main(_arguments("generate", model_dir, None, *more)) == 0
    shown = capsys.readouterr()
    assert "word" in shown.out
    assert "all 6 equal the eager run's" in " ".join(shown.out.split())
    for text in ("mode asked", "mode resolved", "pieces", "replays", "NONE", "tokens/s", "x)"):
        assert text in shown.out
    for phase in ("load", "eager run", "compile and capture", "compiled run"):
        assert f"{phase}" in shown.err


def test_generate_replays_prefill_and_decode(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The prompt has 8 tokens, which is a capture size: pieces; a decode step: one graph."""
    told = _generate_json(capsys, model_dir, {}, "--prompt", PROMPT)
    assert told["tokens_equal"]
    assert told["compiled"]["token_ids"] == told["eager"]["token_ids"]
    assert told["compiled"]["num_prompt_tokens"] == 8
    assert told["stats"]["mode_asked"] == ["FULL_AND_PIECEWISE"]
    assert (told["stats"]["graphs"], told["stats"]["pieces"]) == (2, 6)
    assert _count(told, "captures", "FULL") == 1
    assert _count(told, "captures", "PIECEWISE") == 3
    # Two short answers before (a warm-up, then the capture), then five decode steps.
    assert _count(told, "steps", "FULL") == 7
    assert _count(told, "steps", "PIECEWISE") == 3
    assert _count(told, "steps", "NONE") == 0


def test_generate_runs_other_sizes_without_a_graph(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _generate_json(capsys, model_dir, {}, "--prompt", "what is this")
    assert told["tokens_equal"]
    assert _count(told, "steps", "NONE") == 3
    assert _count(told, "steps", "FULL") == 7


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY"])
def test_generate_in_other_modes(
    model_dir: Path, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    config = {"cudagraph_mode": mode, "cudagraph_capture": "ahead"}
    told = _generate_json(capsys, model_dir, config, "--prompt", PROMPT)
    assert told["tokens_equal"]
    assert told["stats"]["mode_resolved"] == [mode]


def test_generate_takes_token_ids_and_dtype(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--prompt-ids", "3", "5", "7", "--dtype", "float32")
    told = _generate_json(capsys, model_dir, {}, *more)
    assert told["prompt"] == [3, 5, 7]
    assert told["dtype"] == "float32"


def test_generate_tells_a_difference(
    model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answered(*token_ids: int) -> Generation:
        return Generation(
            token_ids=token_ids, text="", num_prompt_tokens=8, prefill_s=0.5, step_s=(0.25, 0.25)
        )

    different = Comparison(
        eager=answered(5, 6, 7),
        compiled=answered(5, 9, 7),
        first_calls_s=1.0,
        stats=Report(1, 1, 0, 1, 0.5, 0.0, ("FULL",), ("NONE",), ("FULL becomes NONE",), {}),
    )
    monkeypatch.setattr(comparison, "compare_with_eager", lambda *_, **__: different)
    assert main(_arguments("generate", model_dir)) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "DIFFER from the eager run's after 1 of 3" in shown
    assert "FULL becomes NONE" in shown
    assert "4.0 tokens/s, eager 4.0 (1.00 x)" in shown


def test_explain_shows_prefill_and_decode(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_arguments("explain", model_dir, None, "--prompt", PROMPT)) == 0
    shown = capsys.readouterr().out
    assert "prefill call" in shown
    assert "decode call" in shown
    assert "scaled_dot_product_attention" in shown
    assert "graphs planned" in shown


def test_explain_as_json(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"cudagraph_mode": "FULL"}
    assert main(_arguments("explain", model_dir, config, "--prompt", PROMPT, "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    (prefill,), (decode,) = told["prefill"]["graphs"], told["decode"]["graphs"]
    assert prefill["call"]["num_tokens"] == 8
    assert (decode["call"]["num_tokens"], decode["call"]["uniform"]) == (1, True)
    assert prefill["call_mode"] == decode["call_mode"] == "FULL"
    assert prefill["caller_inputs"] == ["input_ids", "position_ids"]
    assert told["decode"]["num_graphs"] == 1


@pytest.mark.parametrize("command", ["generate", "explain"])
@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("{bad", "is not JSON"),
        ("[1]", "must be a mapping"),
        ('{"cudagraph_mod": "FULL"}', "did you mean cudagraph_mode"),
        ('{"cudagraph_mode": "HALF"}', "cudagraph_mode='HALF' is not a mode"),
        ('{"cache_dir": ""}', "must name a directory"),
    ],
)
def test_wrong_config(
    capsys: pytest.CaptureFixture[str], command: str, config: str, text: str
) -> None:
    """Found before the model is even looked for."""
    assert main(_arguments(command, "nowhere/at/all", config)) == 2
    shown = capsys.readouterr()
    assert text in shown.err
    assert shown.out == ""


def test_mode_that_cannot_be_had(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Raised inside of Dynamo, shown like any other."""
    config = {
        "cudagraph_mode": "FULL",
        "strict": True,
        "attention_support": {"torch._C._nn.scaled_dot_product_attention": "NEVER"},
    }
    more = ("--prompt", PROMPT, "--max-new-tokens", "3")
    assert main(_arguments("generate", model_dir, config, *more)) == 2
    shown = capsys.readouterr()
    assert "cudagraph-modes: cudagraph_mode=FULL cannot be had" in shown.err
    assert "Traceback" not in shown.err


def test_missing_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(_arguments("generate", "./no/such/model")) == 2
    assert "model='./no/such/model' does not exist" in capsys.readouterr().err


def test_wrong_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--device", "toaster"]) == 2
    assert "--device='toaster' cannot be used" in capsys.readouterr().err


def test_text_longer_than_the_model(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--prompt", PROMPT, "--max-new-tokens", "100")
    assert main(_arguments("generate", model_dir, None, *more)) == 2
    assert "max_new_tokens=100" in capsys.readouterr().err


def test_no_new_tokens_are_refused_before_a_model_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(_arguments("generate", "./no/such/model", None, "--max-new-tokens", "0")) == 2
    assert "--max-new-tokens=0 must be positive; use 1 or more" in capsys.readouterr().err


def test_a_file_is_no_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    for more in ([], ["--clear"]):
        assert main(["cache", "--cache-dir", str(path), *more]) == 2
        assert "is no directory; give the directory" in " ".join(capsys.readouterr().err.split())
    assert path.read_text() == "mine"
    assert main(["cache", "--cache-dir", str(tmp_path / "none")]) == 0


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["generate", "--no-such-thing"])
    assert exit_info.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_logging_is_left_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    package = logging.getLogger("compile_backend")
    before = (package.level, list(package.handlers))
    main(_arguments("generate", "./no/such/model"))
    assert (package.level, list(package.handlers)) == before


def test_cache_is_listed_and_cleared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = ArtefactCache(cache_directory(str(tmp_path)), 2**20, WarnOnce())
    store.keep("ab" * 32, "one", b"x" * 10000, {"model": "Llama", "piece": "piece_2", "ops": 31})
    store.keep("cd" * 32, "one", b"x", {})
    command = ["cache", "--cache-dir", str(tmp_path)]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert f"2 compiled pieces, 0.0 MiB in {tmp_path / 'pieces'}" in shown
    assert re.search(r"Llama +piece_2 +31 +10 KiB", shown)
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["count"], told["directory"]) == (2, str(tmp_path / "pieces"))
    assert told["bytes"] == sum(entry["bytes"] for entry in told["entries"])
    assert main([*command, "--clear"]) == 0
    assert "removed 2 compiled pieces" in capsys.readouterr().out
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("0 compiled pieces")


# --- bench ---

_QUICK_BENCH = ["bench", "--device", "cpu", "--no-start-up", "--rounds", "1", "--steps", "1"]


def test_bench_as_json_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.dumps({**EAGER_PIECES, "cudagraph_mode": "FULL"})
    more = ["--variants", "ours", "--paths", "static", "--compilation-config", config, "--json"]
    arguments = [*_QUICK_BENCH, *more, "--out", str(tmp_path / "tiny")]
    assert main(arguments) == 0
    shown = capsys.readouterr()
    told = json.loads(shown.out)
    assert list(told["static"]) == ["FULL"]
    assert told["static"]["FULL"]["ran_at"] == "FULL"
    assert told["about"]["command"] == shlex.join(["cudagraph-modes", *arguments])
    assert "mean nothing for speed" in told["notes"][0]
    assert "there is no GPU; tiny runs on the CPU" in " ".join(shown.err.split())
    assert json.loads((tmp_path / "tiny.json").read_text()) == told
    assert (tmp_path / "tiny.md").read_text().startswith("command: cudagraph-modes bench ")


def test_bench_tells_a_failure_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--variants", "eager,ours", "--modes", "NONE", "--paths", "static"]

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no luck")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compile_backend.bench.static_steps.first_calls", fails)
        assert main([*_QUICK_BENCH, *more]) == 1
    shown = capsys.readouterr()
    assert "static | NONE failed: RuntimeError: no luck" in shown.out
    assert "| eager |" in shown.out


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--rounds", "0"], "--rounds=0 measures nothing; use 1 or more"),
        (["--variants", "fast"], "--variants='fast' is unknown; use some of eager"),
        (["--variants", "by-hand"], "--variants='by-hand' needs a GPU"),
        (["--shape", "8B"], "--shape='8B' is too large for a CPU; use one of smollm2"),
        (["--modes", "HALF"], "--modes='HALF' is not a mode; use one of NONE, PIECEWISE, FULL"),
        (["--compilation-config", "{bad"], "is not JSON"),
        (["--compilation-config", '{"cudagraph_mode": "HALF"}'], "is not a mode"),
        (
            ["--compilation-config", '{"cudagraph_mode": "FULL"}', "--modes", "FULL"],
            "--modes='FULL' and cudagraph_mode were both given; leave one of them out",
        ),
        (["--shape", "smollm2", "--growth"], "has real weights, so its depth cannot grow"),
    ],
)
def test_bench_that_cannot_be(
    more: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*_QUICK_BENCH, *more]) == 2
    shown = capsys.readouterr()
    assert text in shown.err
    assert shown.out == ""


def test_bench_makes_the_directory_of_its_results_or_refuses_it_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = []
    (tmp_path / "file").touch()
    (tmp_path / "taken.md").mkdir()
    readonly = tmp_path / "readonly"
    readonly.mkdir(mode=0o500)

    def measures(*_: object, **__: object) -> None:
        measured.append(True)
        raise ConfigError("suite", None, "has begun", "end here")

    refused = {
        "/proc/none/tiny": "cannot be written: No such file or directory: ",
        str(tmp_path / "file" / "tiny"): "cannot be written: ",
        str(tmp_path / "taken"): "cannot be written, since ",
        "": "--out='.' names no file",
    }
    if os.geteuid():  # root may write anywhere
        refused[str(readonly / "tiny")] = "cannot be written: Permission denied: "
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compile_backend.bench.suite.run_suite", measures)
        for out, text in refused.items():
            assert main([*_QUICK_BENCH, "--out", out]) == 2
            told = " ".join(capsys.readouterr().err.split())
            assert text.strip() in told
            assert "; name a file in a directory that you may write to" in told
        assert not measured
        assert main([*_QUICK_BENCH, "--out", str(tmp_path / "new" / "deeper" / "tiny")]) == 2
    assert measured
    assert list((tmp_path / "new" / "deeper").iterdir()) == []


def test_module_is_the_command() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "compile_backend", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    ).stdout
    assert "generate" in shown
    assert "explain" in shown
