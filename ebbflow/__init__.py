"""Reinforcement-learning post-training for diffusion and flow-matching models.

Nothing here imports flytekit. The rooms (packages) and modules, lowest first: each imports only
what stands before it in this list, and a test reads the list (tests/test_house.py).

- extras: optional packages, and the error that names a missing one
- recipe: the config schema of a run
- alerts: lines that somebody should read now, pushed to a webhook
- timing: wall time by phase
- formatting: how numbers are written for people
- logs: logging of the command line and of tasks
- progress: how far long work is, on a terminal and in logs
- resume: what a person is told when a local run ends early
- seeding: random streams that need no saved state
- compute: threads and deterministic kernels of a process that computes
- storage: committed folders, Parquet files, locks, digests
- watchdog: what takes long in a process, and the stacks of its threads
- metrics_server: what takes long and the newest metrics of a process, for Prometheus
- data: prompts, preference pairs, and the tables and records that pass between stages
- run_summary: summary.json of a run, with its digest
- plots: charts, image grids, HTML templates
- flow: sigma schedules, the transition, noise
- algorithms: advantages and losses, a file each
- models: an adapter per model family
- rewards: a file per reward, their combination, remote rewards
- stage: what every part of a training stage knows about it
- training: the policy and its copies, FSDP2, the update, checkpoints
- rollouts: the engines that generate samples
- evaluation: fixed prompts and noise, paired statistics, the gate
- tracking: MLflow runs, and the delivery of what they log
- offline: stages that train on a fixed batch of rollouts or pairs
- online: stages that generate, score and train step by step
- registry: versions of registered models, promotion, serving
- report: the page and the summary of a run
- verification: whether a registered version is what the gate decided on
- certification: what a rollout engine does, line by line
- replay: a training step of a tracked run, generated again
- labeling: preferences of people, by a local page
- reward_training: reward models, trained on labels of people
- estimate: the cost of a recipe
- run_notes: what a recipe asks for and its keys do not show
- preflight_models: what the base model of a recipe can do
- preflight: the checks before anything is paid for
- run_list: the runs in a local folder
- comparison: two policies, or two runs, side by side
- retention: what is deleted of earlier runs
- launch: a run on this machine, from the command line
- commands: the commands, a module for each group
- cli: the command line
"""
