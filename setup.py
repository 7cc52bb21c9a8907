"""The part of the build that pyproject.toml cannot say: C code against numpy's headers."""

from pathlib import Path

import numpy as np
from setuptools import Extension, setup

SOURCES = sorted(str(path) for path in Path("csrc").glob("*.c"))

setup(
    ext_modules=[
        Extension(
            "compile_backend._shortcuts",
            SOURCES,
            depends=["csrc/shortcuts.h"],
            include_dirs=[np.get_include()],
            extra_compile_args=["-O3"],
            # Without a C compiler the general code does the same work, with more host time.
            optional=True,
        )
    ]
)
