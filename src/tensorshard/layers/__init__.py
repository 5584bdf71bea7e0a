"""What split layers compute: linear layers, embeddings and cross entropy whose weights or inputs are sharded."""
