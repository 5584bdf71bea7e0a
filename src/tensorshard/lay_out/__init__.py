"""Applies all transforms to one model, or to its pipeline stages. No other package knows every parallelism."""
