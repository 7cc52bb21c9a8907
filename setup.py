"""The part of the build that pyproject.toml cannot say: C code against numpy's headers."""

import numpy as np
from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "compile_backend._shortcuts",
            ["compile_backend/_shortcuts.c"],
            include_dirs=[np.get_include()],
            extra_compile_args=["-O3"],
            # Without a C compiler the general code does the same work, with more host time.
            optional=True,
        )
    ]
)
