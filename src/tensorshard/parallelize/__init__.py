"""Where a Plan is applied: the checks, the passes in their order, the stages, and what is put back after an error."""
