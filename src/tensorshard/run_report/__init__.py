"""What became of runs of ``tensorshard train``: a table for a terminal, and a page."""
