"""What stands between gradients and an optimizer: the whole model's norm, clipping, loss scaling."""
