"""Runs policies: signals in, plans out. Nothing here yet."""
