"""The policy and its updates: parameters, copies, batches, optimiser steps, checkpoints and policy
folders.

Where it fits
    Between ``ebbflow.algorithms`` (losses) and the stages: ``ebbflow.online`` and
    ``ebbflow.offline`` feed batches in.

Why
    Every stage and algorithm shares one update, so FSDP, mixed precision, drift alarms and resume
    work the same everywhere.

How
    - ``policy``: trained parameters (full or LoRA) and their copies (reference, old, sampling,
      rollout, ema, teacher), which are swapped in place; ``adapters``: which layers are trained,
      and LoRA on them; ``sharding``: FSDP2; ``parameter_files``: their files.
    - ``kinds``: a file per kind of algorithm (trajectory, forward process, ...), which
      builds the rows of its losses; ``optimizers``: a file per optimiser; ``trial``: one call of a
      user's loss on random rows.
    - ``batches``: samples to rows of a loss; ``update``: ``PolicyUpdater``, one optimiser step over
      micro-batches; ``passes``: their predictions, gradients and metrics, and what was not finite;
      ``drift``: which updates measure the drift from the base model.
    - ``rollout_correction``: log-probs of stale or rough rollouts, predicted again by the training
      policy.
    - ``policy_io`` and ``policy_metadata``: policy folders between stages; ``start`` and
      ``export``: LoRAs from and for others.
    - ``checkpoint`` and ``stop_conditions``: resume after preemption, and budgets; ``distributed``:
      the process group.
    - ``replay``: what the stages give of a training step that is replayed.

Gotchas
    - A step whose loss or gradient is not finite is not taken: ``TrainingError`` names the row.
    - In float16 the loss scale is halved and the passes are repeated; no step is skipped.
    - All ranks call the same methods in the same order; a rank with too few groups gets all of
      them.
    - Group indices are ascending, and a group is never split between micro-batches.
"""
