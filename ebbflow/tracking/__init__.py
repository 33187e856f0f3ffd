"""What a run leaves in MLflow: runs with metrics and artifacts, versions in the model registry,
and the report.

Where it fits
    Near the top: it shows the results of all rooms below and none of them imports it. Training
    stages log to the protocol ``ebbflow.stage.MetricsLogger``; the tasks pass them a
    ``child_run.RunLogger``.

Why
    Metrics are worth less than GPU hours, so an outage of MLflow must not stop a stage, and must
    not lose or repeat a value either. The registry is the opposite: a write that fails must fail
    the promotion.

How
    - ``store``: which MLflow store a recipe uses, whether it works, and how runs are found by tags.
    - ``parent_run``: one MLflow run per execution. ``child_run``: one below it per node; a retry
      resumes it.
    - A node's ``RunLogger`` puts records into a buffer (``pending``) and a ``sender`` delivers
      them; ``delivery`` writes each kind so that a repetition changes nothing. What is pending when
      a node ends is saved in the run's folder, and delivered by the next attempt or at the end of
      the run (``outage``).
    - ``curves``: what the parent shows of all stages, by the training steps of the run; ``sinks``:
      where the curves go besides MLflow. ``system_metrics``: the load of a node's machine. ``ui``:
      MLflow's UI, opened at the runs.
    - ``nodes``: what evaluations, stages, shards and the gate log.
    - ``registry``: challenger and champion; ``model_version``: what a version contains;
      ``registry_lock``: one promotion at a time; ``serving``: how MLflow loads a version.
    - ``evidence``: what the gate decided from, stored with a version; ``verification`` checks it
      and decides again.
    - ``replay``: a training step of a run again, as a page and a table. ``pages``: how pages are
      made from templates.
    - ``report``: one HTML page without references to other files, summary.json, and a table for the
      terminal.

Gotchas
    - MLflow appends: log absolute steps, never "the next one", or a resumed run has values twice.
    - MLflow's client repeats a POST whose answer was lost. Everything that creates something looks
      for its duplicate afterwards.
    - A server without its database answers 400, as it does to records that it will never take.
      ``sender`` tells them apart.
    - Prompts and names come from users: the report escapes everything.
"""
