"""Transforms of a model that concern one rank alone: precision, recomputation, compilation, offloaded activations."""
