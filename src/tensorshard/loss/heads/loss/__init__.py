"""The loss of a head: two passes over the tiles, as one operation of autograd."""
