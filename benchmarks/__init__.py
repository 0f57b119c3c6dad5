"""Benchmarks: each runs by ``python -m benchmarks.<name>`` and states a ratio against a peer or a physical limit."""
