"""Decisions over signals, as pure functions. Nothing here yet."""
