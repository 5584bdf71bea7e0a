"""Fails if the quickstart's last validation loss is not under 2.3 nats a byte."""

import json
import sys
from pathlib import Path

rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
last = [row["val_loss"] for row in rows if row.get("val_loss") is not None][-1]
print(f"quickstart: validation loss {last:.4f} nats a byte after {rows[-1]['step']} steps")
sys.exit(last >= 2.3)
