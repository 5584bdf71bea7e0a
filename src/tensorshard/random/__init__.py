"""Random numbers that belong to elements: the same at every layout, and nothing to restore.

Each number is a function of the seed, the step, the call site and the place of the element in the whole tensor, with
all samples of the batch. So each rank draws its part by itself.

    philox            random words for any box of a whole tensor
    distributions     what torch's random operators make of such words
    axes              which dimension of what is drawn are the samples
    trial_runs        finding that out, on fake tensors
    call_sites        which call draws: paths, and tickets by which a recomputed call is recognised
    kernels           behind torch's random operators
    plain_loop        the same for a loop on one process, without an Engine
"""
