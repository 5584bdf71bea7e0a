"""Data parallelism: ZeRO 0 to 3, hybrid sharding, the reduction of gradients, batch normalization.

One parameter, a ``ZeroParameter``, is the same at every level. Its ``storage`` is padded and has a row for each rank;
``compute`` is a view of it, which the module holds for life; ``master`` is what the optimizer updates.

- Level 0: ``compute`` is whole, and ``master`` is ``compute``.
- Levels 1 and 2: ``compute`` is whole. ``master`` is a view of this rank's row, or, in 16 bits and with offload, a copy
  of it. After an update the row is copied where it is one, rows are gathered, and a unit waits for its own.
- Level 3: ``compute`` has memory while it is used; ``master`` is a copy of this rank's row. An update drops what is
  whole. The row is copied and gathered before a unit computes.

``PublishedWeights`` does this for levels 0 to 2, ``ReleasedWeights`` for level 3. Both meet code of the user's in one
way: a ``Watch`` (``model/watched_parameters.py``) that is away while the unit itself computes.

Gathers and reductions of level 3 go through one queue, so all ranks make them in one order. ``UnitOrder._reach`` is the
one place that gathers in forward, ``UnitOrder._pass`` the one that gathers, releases and reduces in backward, also for
units that a rank has left out. A unit's gather begins when the unit before it begins to compute, both ways.

Memory is taken and given back on the compute stream. A gather's stream waits for the compute stream when it is
launched, and ``ReleasedWeights.need`` makes the compute stream wait for the gather. So memory that is given back and
taken again is used in order, without events. The price: a gather overlaps the unit before it alone.

A gather in 8 bits would be a ``Bucket``'s message in another type: ``PublishedWeights._gather`` makes it, and
``unpack`` reads it. Another level for a part of the model is another ``Groups`` for its parameters, which
``ZeroModel._materialize`` chooses for each, as it does for experts.
"""
