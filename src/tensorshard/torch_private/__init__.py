"""Every private name of torch that tensorshard uses, one file a topic; no other file names one.

Each function, class and name says what it is used for, with which versions of torch it was checked, and which public
way would replace it. ``tests/torch_private/test_torch_private.py`` checks that the rest of the package names none.
Nothing here imports anything else of tensorshard. Each topic is imported by itself, so that nobody waits for topics
that are not used.

    attention          kernels of attention that also tell their sums
    autograd           asking whether backward is running, and steering it
    coalescing         several collectives as one call, and packed messages
    compilation        when torch.compile compiles
    dispatch           modes and classes that see every operation
    dtensor            a DTensor's own shard, its subclasses and its operators
    fake_results       results of operators on fake tensors, kept for the next call
    fake_tensors       running a model in shapes alone
    modules            a module's own tensors, hooks and conversions; base classes of its layers
    operators          operators without a public name, and what an operator says of itself
    optimizers         clipping, unscaling and learning rates
    patches            what is put in the place of torch's functions
    pipelining         what torch's pipeline schedules ask of a stage
    process            what torch keeps for this process, and says
    process_groups     process groups of one's own, and what a group is made of
    pytree             nested structures of tensors
    random_operators   kernels behind torch's random operators, and what a run draws
    recomputation      forwards that checkpoints repeat
    tensors            a tensor's memory, version and kind
"""
