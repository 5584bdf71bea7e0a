"""Starting the worker processes of a run, and ending with them."""
