"""Offline stages: a large batch of samples, generated and scored once in shards, and training
epochs over it.

Where it fits
    One file per task of the stage: ``rollouts`` (a shard of samples), ``scoring``, ``advantages``
    or ``pairs``, and ``training`` (epochs, on a group of processes). The tasks hand Parquet files
    to each other; ``shards`` reads and checks them, and ``batches`` says which rows of them each
    optimiser step trains on.

Why
    Shards are generated and scored on as many pods as there are, in one pass, and re-scoring never
    regenerates. Forward-process losses need only final latents, so the same samples serve several
    epochs.

How
    ``train_epochs`` walks through a seeded order of shards and batches. A thread reads the next
    shard while the second half of one is trained on, and a batch's latents are freed with it.
    ``training.stage_loop`` is the frame of its loop: progress, checkpoints, budget and preemption,
    the same as online. ``replay`` gives the samples of one optimiser step again.

Gotchas
    - The order of batches depends on the number of processes, so a checkpoint resumes only with as
      many as before.
    - The old policy that generated the samples stays as it is until the stage ends; then it becomes
      the trained one.
    - Every process reads the row groups of its own rows, which lie all over a shard: each decodes
      most of it.
    - Every process decides the same things: which shards are large enough, which checkpoint is the
      newest (rank 0 chooses).
"""
