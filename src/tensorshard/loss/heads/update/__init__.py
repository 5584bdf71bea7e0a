"""Updates of a head's weight inside of its backward pass."""
