"""Small things that every room may use: this library's version, paths, words for people, lazy imports."""

__version__ = "0.1.0"
