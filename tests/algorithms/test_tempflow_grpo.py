"""TempFlow-GRPO: the weight of a step is its noise, and all samples of a prompt are one until the
step where they branch.
"""

import torch
from algorithm_rows import gradient, moved, rollout

from ebbflow.algorithms.built_in.flow_grpo import FLOW_GRPO, FlowGRPOConfig
from ebbflow.algorithms.built_in.tempflow_grpo import ALGORITHM, TempFlowGRPOConfig
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.windows import plan_steps
from ebbflow.recipe.stages import OnlineStageConfig
from ebbflow.rollouts.generate import generate_samples


def test_a_row_is_that_of_flow_grpo_times_the_standard_deviation_of_its_step():
    made = rollout(rows=5)
    config = TempFlowGRPOConfig(noise_weight=3.0, clip_range=0.5)
    plain = FlowGRPOConfig(clip_range=0.5)
    leaf = moved(made)
    rows = made.rows(leaf)
    weight = 3 * rows.transition.std
    assert weight.shape == (5,)
    assert len(set(weight.tolist())) == 5
    loss, metrics = ALGORITHM.loss(rows, config)
    expected, others = FLOW_GRPO.loss(rows, plain)
    torch.testing.assert_close(loss, weight * expected)
    torch.testing.assert_close(metrics.pop("tempflow/weight"), weight)
    assert metrics.keys() == others.keys()
    found = gradient(ALGORITHM, rows, config, leaf)
    torch.testing.assert_close(
        found, weight[:, None, None] * gradient(FLOW_GRPO, rows, plain, leaf)
    )


def test_the_samples_of_a_prompt_are_one_until_the_step_where_they_branch(model, monkeypatch):
    """At every step but the last, each at some optimisation step."""
    stage = OnlineStageConfig(algorithm=TempFlowGRPOConfig(), sampler={"steps": 4}, group_size=3)
    assert stage.shared_initial_noise
    chosen = [plan_steps(stage.window, 4, step, seed=0) for step in range(30)]
    assert {one.trained for one in chosen} == {(0,), (1,), (2,)}
    assert all(one.stochastic == one.trained for one in chosen)
    keys = SampleKeys(5, [0, 0, 0, 1, 1, 1], [0, 1, 2] * 2, sharing=[3])
    conditioning = model.encode_texts(["ABCD"] * 3 + ["WXYZ"] * 3)
    predicted = []
    velocity = model.predict_velocity
    monkeypatch.setattr(
        model,
        "predict_velocity",
        lambda x, *rest: (predicted.append(len(x)), velocity(x, *rest))[1],
    )
    rollouts = generate_samples(
        model, conditioning, keys, stage.sampler, next(one for one in chosen if one.trained == (2,))
    )
    assert predicted == [
        2,
        2,
        6,
        6,
    ]  # once for each prompt, until the step that training predicts for every sample
    before = rollouts.trajectory.latents[:, 0]
    after = rollouts.trajectory.next_latents[:, 0]
    for group in (slice(0, 3), slice(3, 6)):
        torch.testing.assert_close(
            before[group], before[group][:1].expand(3, *before.shape[1:]), rtol=0, atol=1e-5
        )
        for values in (after, rollouts.latents):
            assert (values[group][0] - values[group][1]).abs().max() > 0.05
    assert (before[0] - before[3]).abs().max() > 0.05
