"""Remora: serves many language models from shared memory on Ray."""

__version__ = "0.1.0"
