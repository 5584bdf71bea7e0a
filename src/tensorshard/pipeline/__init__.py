"""Pipelines: tracing a model, cutting it into stages, running them by a schedule."""
