"""Checkpoints of other programs: opened in place, and read in slices as one of ours is.

Each program has a module that says where the values of weights and optimizer states are stored; nothing is copied.
"""
