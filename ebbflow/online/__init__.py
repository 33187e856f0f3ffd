"""Online stages: the hot loop that repeats rollout, score, advantages, update, with every model in
memory.

Where it fits
    ``tasks/train_online.py`` calls ``train_online_folder`` (``train_folder.py``) with a policy
    folder and gets a trained one. Below it are the rooms that do the work: ``rollouts`` (engines),
    ``rewards`` (scorers), ``training`` (the update) and ``algorithms`` (the loss).

Why
    A Flyte node costs a pod start and a model load. An online stage trains hundreds of steps on
    fresh samples, so it is one node that keeps its models loaded, and it overlaps rollouts, rewards
    and training where the hardware allows it.

How
    ``OnlineLoop._train_steps`` (``loop.py``) is the loop: one page, one coroutine. It awaits
    ``RolloutQueue``, which keeps rollouts in flight, and ``TrainingGroup``, which trains. Workers
    are anything whose methods can be awaited: objects and threads of this process
    (``LocalWorkers``) or Ray actors (``ray_workers.py``). The three modes differ only in how
    many steps the queue runs ahead, and the two placements only in where workers run. ``replay``
    runs the loop again as far as one step's samples.

Gotchas
    - In one process a rollout task generates when it first runs. It must run before training moves
      the weights, or its samples are of another version than they say:
      ``RolloutQueue.start_rollouts`` yields once for that.
    - The order of steps: in one process steps keep their order and the same recipe gives the same
      bytes. On Ray ``async`` takes the first step that is done, so its order depends on timing.
    - A call that is repeated keeps its place: a replaced worker gets the dead worker's request at
      once, not the next in line.
    - Prompts for training and for validation are encoded apart: prompts are padded to the longest
      of those encoded together, so validation prompts in the same table would change training.
    - Nothing here imports ray at the top except ``ray_actor`` and ``ray_workers``.
"""

from ebbflow.extras import require

require("ebbflow.online", "cv2", "pandas")
