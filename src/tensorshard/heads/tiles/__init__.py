"""The classes of a rank a tile at a time, and what is computed on one tile."""
