"""The benchmark suite: what to measure, how it is run side by side, and what is written down."""
