"""Data parallelism: ZeRO 0 to 3, hybrid sharding, the reduction of gradients, batch normalization."""
