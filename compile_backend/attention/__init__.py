"""Attention over a paged cache, as an op that graphs are split at."""
