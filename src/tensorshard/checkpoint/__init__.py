"""Checkpoints: written under one plan, read under any other."""

from tensorshard.checkpoint.checkpoint import load, save

__all__ = ["load", "save"]
