"""Rollout engines: samples, their images and the trained steps of their trajectories, from a policy
and noise.

Where it fits
    Between ``training`` (the policy) and ``rewards`` (the images). Rollout workers of online stages
    and the rollout shards of offline stages call an engine; evaluation calls ``generate`` itself.

Why
    A faster engine is worth nothing if its samples are those of another policy. So every engine
    starts from the same noise, and one that is not the reference has to show its log-probs before
    it may generate.

How
    - ``generate`` is the reference, ``Diffusers``: diffusers' network under our own denoising loop.
      ``engine`` has the ``Engine`` protocol and ``open_engine`` for all others, a user's own too.
    - ``parity`` is the gate: the training policy replays what another engine generated.
    - ``vllm_omni`` runs in an environment of its own; ``wire`` is what both sides say, ``weights``
      how weights travel.

Gotchas
    - Noise is a function of (seed, prompt id, sample, step): never draw it from a global generator.
    - Which samples share a micro-batch can change the last bits: engines split as the recipe says,
      and decode in the same parts.
    - Before the first update a LoRA changes nothing, so the gate says little about weights; online
      stages ask it again.
"""
