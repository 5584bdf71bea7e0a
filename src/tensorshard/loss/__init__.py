"""The last layer and its loss: formulas, logits that are split or deferred, heads of many classes."""
