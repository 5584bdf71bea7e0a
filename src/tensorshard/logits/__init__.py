"""A model's logits that look whole and are not computed yet, and the losses that never have them computed."""
