"""The commands of ``tensorshard``, one a file: each adds its own parser and says what to do."""
