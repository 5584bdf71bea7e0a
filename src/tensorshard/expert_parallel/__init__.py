"""Expert parallelism: each rank has some of a mixture's experts, and tokens travel to those that were chosen for them.

The ranks have different samples (Shazeer et al. 2017, "Outrageously Large Neural Networks"; Lepikhin et al. 2020,
"GShard"). Tokens are sent by all-to-all, with counts: there is no capacity, and none is dropped.
"""
