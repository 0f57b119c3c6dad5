"""What the benchmarks compare with: each peer in a venv of its own, driven by a script that prints JSON lines."""
