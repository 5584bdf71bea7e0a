"""A rank's classes, a tile at a time, and the operations on one tile."""
