"""Checkpoints: written under one plan, read under any other."""
