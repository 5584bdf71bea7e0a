"""Communication: collectives, how a dimension is cut into shards, process groups, decisions of one rank for all."""
