"""Every private name of torch that tensorshard uses, one file a topic; no other file names one.

Each function, class and name says what it is used for, with which versions of torch it was checked, and which public
way would replace it. ``tests/torch_private/test_torch_private.py`` checks that the rest of the package names none.
Nothing here imports anything else of tensorshard. Each topic is imported by itself, so that nobody waits for topics
that are not used.

    autograd           asking whether backward is running, and steering it
    compilation        when torch.compile compiles
    ddp                what ``DistributedDataParallel`` averages and leaves alone
    dispatch           modes and classes that see every operation
    dtensor            a DTensor's own shard, its subclasses and its operators
    fake_tensors       running a model in shapes alone
    fsdp               FSDP2's collectives
    fsdp_calls         when FSDP2 gathers and reduces a unit
    messages           what torch says that a user cannot act on
    modules            a module's own tensors, hooks and conversions; base classes of its layers
    operators          operators without a public name, and what an operator says of itself
    optimizers         clipping, unscaling and learning rates
    pipelining         what torch's pipeline schedules ask of a stage
    process_groups     process groups of one's own, and what a group is made of
    pytree             nested structures of tensors
    tensors            a tensor's memory, version and kind
"""
