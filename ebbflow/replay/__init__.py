"""A training step of a tracked run, generated again (``ebbflow replay``).

Where it fits
    Above ``online`` and ``offline``, which replay the step, and above ``tracking`` and
    ``registry``, where the run's recipe, policies and base model are found.

How
    - ``tracked_step``: find what the step needs and replay it.
    - ``output``: the page and the table that a replay writes.
"""
