"""Adaptors for engines. Nothing here yet."""
