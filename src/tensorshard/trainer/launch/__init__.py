"""Starts the worker processes of a run, and ends when they end."""
