"""What an attention backend needs of a machine, and how it says what is lacking.

This file refuses to know backends. Packages of kernels are imported only to find out whether they
can be: a build for another torch is found and does not load.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch


def it_needs(*lacking: str | None) -> str | None:
    """Everything that is lacking in one sentence; None if nothing is.

    Args:
        lacking: what the functions below return.
    """
    named = [what for what in lacking if what is not None]
    return "it needs " + ", and ".join(named) if named else None


def lacking_device(
    device: torch.device, *, minimum: tuple[int, int], same_major: bool = False
) -> str | None:
    """The device that is needed instead; None if this one will do.

    Args:
        device: where kernels would run.
        minimum: the least compute capability.
        same_major: whether kernels are for that major version alone.
    """
    major, minor = minimum
    wanted = "a CUDA device of compute capability " + (
        f"{major}.x" if same_major else f"{major}.{minor} or more"
    )
    if device.type != "cuda":
        return f"{wanted} (not device='{device}')"
    if not torch.cuda.is_available():
        return f"{wanted} (torch {torch.__version__} sees none)"
    found = torch.cuda.get_device_capability(device)
    if found >= minimum and (not same_major or found[0] == major):
        return None
    return f"{wanted} ({device} has {found[0]}.{found[1]})"


def lacking_package(module: str, requirement: str) -> str | None:
    """What to install; None if the module can be imported.

    Args:
        module: as it is imported.
        requirement: as pip wants it.
    """
    remedy = f"the package {requirement.partition('==')[0]} (pip install {requirement})"
    if find_spec(module) is None:
        return remedy
    try:
        import_module(module)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"{remedy}: importing {module} failed: {error}"
    return None
