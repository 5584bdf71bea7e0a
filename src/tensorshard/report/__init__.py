"""Reports on runs of ``tensorshard train``: a table for a terminal, and a page."""
