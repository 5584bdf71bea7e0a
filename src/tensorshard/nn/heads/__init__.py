"""The parts of the tiled head: a linear layer and its cross entropy, a tile of the classes at a time."""
