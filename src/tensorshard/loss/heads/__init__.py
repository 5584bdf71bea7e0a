"""Classification heads that compute their loss a tile of the classes at a time."""
