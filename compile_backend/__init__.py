"""CUDA graph modes for any PyTorch model, as a `torch.compile` backend.

`torch.compile(model, backend="cudagraph_modes", options={"cudagraph_mode": ...})` needs no import
of this package: the backend registers by entry point. What is here is for those who want more.
"""

from compile_backend.backend import reset, stats
from compile_backend.batch import BatchDescriptor
from compile_backend.capture_session import capture
from compile_backend.config import CompilationConfig, CUDAGraphMode, PassConfig
from compile_backend.context import ForwardContext, get_forward_context, set_forward_context
from compile_backend.dispatch import CudagraphDispatcher
from compile_backend.errors import CaptureError, ConfigError
from compile_backend.explain import explain
from compile_backend.guards import keep_argument_guards_unsafe
from compile_backend.resolve import Resolution, resolve_cudagraph_mode
from compile_backend.runner import GraphModelRunner
from compile_backend.runner_batch import Batch
from compile_backend.step_inputs import Dim, InputSpec
from compile_backend.support import AttentionCGSupport
from compile_backend.wrapper import CUDAGraphWrapper

__all__ = [
    "AttentionCGSupport",
    "Batch",
    "BatchDescriptor",
    "CUDAGraphMode",
    "CUDAGraphWrapper",
    "CaptureError",
    "CompilationConfig",
    "ConfigError",
    "CudagraphDispatcher",
    "Dim",
    "ForwardContext",
    "GraphModelRunner",
    "InputSpec",
    "PassConfig",
    "Resolution",
    "capture",
    "explain",
    "get_forward_context",
    "keep_argument_guards_unsafe",
    "reset",
    "resolve_cudagraph_mode",
    "set_forward_context",
    "stats",
]
