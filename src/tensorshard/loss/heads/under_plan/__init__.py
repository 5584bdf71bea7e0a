"""What a Plan does with the heads of a model."""
