"""Reinforcement-learning post-training for diffusion and flow-matching models.

The rooms, by the road that data takes: recipe, data, models, flow, rollouts, rewards,
algorithms, training, online, evaluation, tracking. Nothing here imports flytekit.
"""
