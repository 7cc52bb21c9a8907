"""`python -m compile_backend` is the command line `cudagraph-modes`."""

import sys

from compile_backend.cli import main

sys.exit(main())
