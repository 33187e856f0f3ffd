"""What a run leaves in MLflow: a run per execution, one below it per node, their metrics and files.

Where it fits
    Below the stages, and it knows no loop: training stages log to the protocol
    ``ebbflow.stage.MetricsLogger``, and the tasks pass them a ``child_run.RunLogger``. The rooms
    ``registry``, ``report``, ``verification`` and ``replay`` read what this one writes.

Why
    Metrics are worth less than GPU hours, so an outage of MLflow must not stop a stage, and must
    not lose or repeat a value either.

How
    - ``store``: which MLflow store a recipe uses, whether it works, and how runs are found by tags.
    - ``parent_run``: one MLflow run per execution. ``child_run``: one below it per node; a retry
      resumes it.
    - A node's ``RunLogger`` puts records into a buffer (``pending``) and a ``sender`` delivers
      them; ``delivery`` writes each kind so that a repetition changes nothing. What is pending when
      a node ends is saved in the run's folder, and delivered by the next attempt or at the end of
      the run (``outage``).
    - ``curves``: what the parent shows of all stages, by the training steps of the run; ``sinks``:
      where the curves go besides MLflow, a file each; ``node_sinks``: those of a node.
    - ``system_metrics``: the load of a node's machine. ``ui``: MLflow's UI, opened at the runs.
    - ``nodes``: what evaluations, stages, shards and the gate log.

Gotchas
    - MLflow appends: log absolute steps, never "the next one", or a resumed run has values twice.
    - MLflow's client repeats a POST whose answer was lost. Everything that creates something looks
      for its duplicate afterwards.
    - A server without its database answers 400, as it does to records that it will never take.
      ``sender`` tells them apart.
"""
