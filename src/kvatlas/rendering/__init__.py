"""Requests turned into the token ids an engine would see."""

from kvatlas.rendering.tiny_model import write_tiny_model

__all__ = ["write_tiny_model"]
