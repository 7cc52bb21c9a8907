"""Rewrites of FX graphs. They import torch and nothing of the backend."""
