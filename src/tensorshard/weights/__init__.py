"""The weights that training begins with: a constructor's own, one tensor at a time, or those of files."""
