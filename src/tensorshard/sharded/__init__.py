"""What a model is under any plan, as the Engine and checkpoints see it."""
