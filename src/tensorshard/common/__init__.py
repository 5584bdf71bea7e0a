"""Small things that every room may use: paths, quantities in words, the terminal, lazy imports."""
