"""Names of what the flywheel leaves in ``output`` outside of runs: what makes the files and what
deletes them agree here.
"""

TRAININGS = "reward_models"
"""``reward_models/NAME/DIGEST``: a training of a reward model under way."""
QUEUES = "queues"
"""``queues/RECIPE``: the pairs to label next, and the bad cases of the last turn."""
QUEUE = "queue.parquet"
TURN = "turn.txt"
"""In a queue's folder while a turn is under way: what its run is tagged with."""
COPIED_MODELS = "models"
"""``queues/RECIPE/models/DIGEST``: what only the generation of a queue needs, by the digest of the
recipe, which may change before a killed generation is started again.
"""
