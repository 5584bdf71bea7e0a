"""Tensor and sequence parallelism: the table, applying it, verifying it by numbers, searching for one."""
