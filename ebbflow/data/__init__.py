"""Prompts, preference pairs, and the tables and records that pass between stages.

Where it fits
    Above ``ebbflow.recipe`` and ``ebbflow.storage``, below everything that generates, scores or
    trains. A run starts here: a prompt file becomes the prompt table that every later stage reads.

Why
    Files of prompts and pairs come from other people: they may be damaged, huge, in another
    encoding, or name images that they must not read. All checks are here, once, so that the stages
    can trust what they are given.

How
    - ``schema``: the Arrow schema of every table; ``records``: the typed records (evaluations,
      decisions, runs).
    - ``prompt_files``, ``pairs``: reading of users' files, on top of ``files`` (strict JSON lines,
      UTF-8) and ``images``.
    - ``prompts``: the prompt table; ``twins``: which prompts are equal in another spelling;
      ``prepare``: from a recipe to that table; ``sampling``: the
      prompts of a training step.

Gotchas
    - Samples are keyed by ``(prompt_id, sample)``. With the run's seed the key fixes the noise
      (``ebbflow.seeding``): a new order of prompts is a new run.
    - The split of a prompt file depends on the texts alone, never on the run's seed or the order of
      lines: a challenger must not train on what its champion is judged by.
    - ``records`` and ``schema`` must import nothing heavy: tasks name these types while they
      register.
    - Of a file at a URI only the file itself is fetched. Images beside it are not; put their bytes
      into Parquet.
"""
