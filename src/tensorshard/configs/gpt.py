"""GPT-2 small (124M parameters) on a file of tokens; give your own with data.train.source=... (see docs)."""
