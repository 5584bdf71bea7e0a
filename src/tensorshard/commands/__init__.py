"""The commands of ``tensorshard``, one in each file. Each adds its own parser and runs."""
