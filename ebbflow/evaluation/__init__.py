"""Evaluate policies on fixed prompts, choose a candidate, and decide whether it replaces the
champion.

Where it fits
    Above ``models``, ``rollouts``, ``rewards`` and ``training``; below ``tracking``, which shows
    its results, and the tasks, which run it after every stage.

Why
    A training reward is a poor measure of progress: prompts, noise and the policy's exploration
    change with every step. Here the prompts, the noise, the sampler and the size are the same for
    every policy, so a difference is the policy's.

How
    - ``evaluate``: one sample per validation and held-out prompt, and several of some held-out
      ones, scored with all rewards and guardrails, and the velocity drift.
    - ``image_statistics``: entropy, edges, brightness, diversity ... of the samples;
      ``distribution``: what a mean hides.
    - ``selection``: the candidate is the policy with the best validation reward; also when to stop
      training.
    - ``gate``: on the held-out prompts, the reward's paired difference must lie above zero and no
      guardrail may fall too far.
    - ``non_inferiority``: the gate's test that image statistics moved by less than their margins.
    - ``statistics``: the paired bootstrap behind the gate, and Holm's correction.
    - ``serve``: images of a registered policy, from prompts and seeds.

Gotchas
    - Validation prompts choose and stop, held-out prompts decide. Never use the held-out ones for
      anything else.
    - Noise comes from the evaluation's own seed, not the recipe's: a champion of another recipe is
      met on equal terms.
    - A sample that could not be generated or scored has no reward. It lowers coverage, and the gate
      wants full coverage.
"""
