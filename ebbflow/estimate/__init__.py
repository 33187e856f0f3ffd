"""What a run of a recipe takes: memory, work, storage, hours. No weights are loaded and nothing is
downloaded.

Where it fits
    Above everything that it counts. ``ebbflow estimate`` prints it, and the dry run compares it
    with a deployment's machines.

Why
    A process that does not fit fails after the model was downloaded and prompts were encoded:
        better before.

How
    - ``memory``: bytes of each kind of process; ``work``: evaluations of the network and bytes
      stored.
    - ``run``: both for a whole recipe, from the sizes that ``ebbflow.models.sizes`` measures on the
      meta device.
    - ``measured``: those sizes from the user's cache, so that the command needs no torch the second
      time.
    - ``hours``: the time, from a throughput that the user states.
    - ``text``: all of it for people.

Gotchas
    - Counts are upper bounds; activations are an estimate (``memory``). CUDA's context and
      fragmentation come on top.
"""
