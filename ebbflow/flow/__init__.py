"""Flow matching: noise, denoising steps and trajectories, as functions on tensors.

Where it fits
    Below ``ebbflow.models``, ``ebbflow.rollouts`` and ``ebbflow.training``. It knows no network,
    only velocities.

Why
    Rollout and training must compute the same step in the same precision: a ratio of log-probs is
    only 1 before the first update if both run this code, in float32.

How
    - ``noise``: every random number is a function of (seed, prompt id, sample, step, stream), so
      neither the batch nor the process that computes it matters.
    - ``sampler``: what a sampler is, and mean, std and log-prob of one stochastic step;
      ``samplers``: a file for each (Flow-SDE, Dance-SDE, CPS and the deterministic ones).
    - ``windows``: which steps are stochastic and which are trained, and what a rollout records at
      the trained ones.
    - ``renoising``: noises a latent again that is part noise already.

Gotchas
    - sigma runs from 1 (noise) to 0 (image); the velocity is eps - x0.
    - The last step is deterministic, so no window contains it.
    - The log-prob of CPS leaves out 1 / (2 b^2) and is no density: thresholds on it have no unit.
"""
