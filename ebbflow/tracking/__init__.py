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
    - ``reconcile``: the status of runs that were killed, aborted or failed outside of this code.
    - ``curves``: what the parent shows of all stages, by the training steps of the run; ``sinks``:
      where the curves go besides MLflow, a file each; ``node_sinks``: those of a node.
    - ``system_metrics``: the load of a node's machine. ``ui``: MLflow's UI, opened at the runs.
    - ``nodes``: what evaluations, stages, shards and the gate log.

Not MLflow's asynchronous logging
    ``MlflowClient.log_batch(synchronous=False)`` with a spool file was tried in place of
    ``pending`` and ``sender`` (MLflow 3.17.2, SQLite):

    - It drops what fails: of 300 steps with an outage during 100 of them, 200 were stored.
      ``flush_async_logging`` raises nothing, and a process that ends during an outage exits with
      status 0 and leaves nothing behind.
    - With ``MLFLOW_ASYNC_LOGGING_BUFFERING_SECONDS`` one metric that MLflow refuses takes its whole
      merged batch along: of 49 steps none was stored, and 48 of the 49 calls reported success, so
      a spool could not know what to keep. Without that setting each call is a request of its own:
      300 instead of 2.
    - A retry appends the steps after its checkpoint again: 0 1 2 3 4 3 4 5 6 7.
    - A run must exist before anything is logged to it, so a node that starts during an outage has
      nowhere to log, and tables, datasets and files have no asynchronous call.

    The spool would have to keep each record until it is acknowledged, skip what the run already
    holds, separate refused records from an outage and create the run late. That is all of this
    room but the single call of ``log_batch``.

Gotchas
    - MLflow appends: log absolute steps, never "the next one", or a resumed run has values twice.
    - MLflow's client repeats a POST whose answer was lost. Everything that creates something looks
      for its duplicate afterwards.
    - A server without its database answers 400, as it does to records that it will never take.
      ``sender`` tells them apart.
    - Resuming a run turns FAILED into RUNNING; a killed process leaves RUNNING behind, until
      ``reconcile`` finds it.
    - Parameters are immutable, and an NaN metric is accepted without a word.
"""
