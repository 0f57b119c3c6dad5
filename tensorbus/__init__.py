"""Tensors that outlive the process that made them; every lifecycle change is a fact on NATS JetStream."""

__version__ = "0.1.0"

__all__ = ["__version__"]
