"""The offload example: the same losses wherever the states are, and no more traffic than they need."""

import re

from scripts import run_example

SMALL = ["--blocks", "2", "--width", "128", "--heads", "2", "--tokens", "8", "--vocabulary", "4000", "--steps", "3"]


def test_losses_are_the_same_and_traffic_is_what_the_states_need(ranks, tmp_path):
    printed = {
        tier: ranks(1, run_example, "offload", *SMALL, "--tier", tier, "--path", str(tmp_path), "--buffers", "1MiB")[0]
        for tier in ("device", "disk")
    }
    losses = {tier: re.findall(r"loss ([\d.]+)", text) for tier, text in printed.items()}
    assert losses["disk"] == losses["device"]
    assert len(losses["disk"]) == 3
    moved = re.findall(r"([\d.]+) bytes read and ([\d.]+) written", printed["disk"])
    for read, written in moved[1:]:  # in the first step there are no states yet to be read
        # A master, two states and a gradient; small parameters are rounded up to whole blocks.
        assert 16 <= float(read) <= 16.8
        assert 16 <= float(written) <= 16.8
