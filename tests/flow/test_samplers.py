"""A sampler is one object in one file: what a recipe reads of it, and a new one."""

import subprocess
import sys
import textwrap

import pytest

from ebbflow.flow.sampler import Sampler, find_sampler
from ebbflow.recipe.samplers import SAMPLERS, STOCHASTIC_SAMPLERS

HALF = """
    from ebbflow.flow.sampler import Sampler


    class Half(Sampler):
        description = "half of the noise of Dance-SDE"
        eta = 0.15

        def step(self, latents, velocity, sigmas, step, eta):
            scale = sigmas[step].new_full(sigmas[step].shape, eta)
            return self.sde_transition(latents, velocity, sigmas, step, scale)


    SAMPLER = Half()
"""
USE = """
    import sys

    import ebbflow.flow.samplers

    ebbflow.flow.samplers.__path__.append(sys.argv[1])
    from ebbflow.recipe import Recipe

    assert "torch" not in sys.modules
    stage = {"kind": "online", "sampler": {"name": "half"}}
    sampler = Recipe.model_validate({"stages": [stage]}).stages[0].sampler
    assert sampler.is_stochastic
    assert "half: half of the noise" in type(sampler).model_fields["name"].description

    import torch

    from ebbflow.flow.sampler import compute_log_prob, compute_transition

    sigmas = torch.tensor([1.0, 0.5, 0.0])
    latents = torch.ones(2, 3)
    half = compute_transition("half", latents, latents, sigmas, 0)
    dance = compute_transition("dance_sde", latents, latents, sigmas, 0, eta=0.15)
    assert torch.equal(half.mean, dance.mean) and torch.equal(half.std, dance.std)
    assert compute_log_prob(half, latents).isfinite().all()
"""


@pytest.mark.any_cpu
def test_a_new_sampler_is_one_file_that_a_recipe_can_name(tmp_path):
    (tmp_path / "half.py").write_text(textwrap.dedent(HALF))
    subprocess.run([sys.executable, "-c", textwrap.dedent(USE), str(tmp_path)], check=True)


def test_every_file_has_a_sampler_with_the_name_of_the_file():
    assert list(SAMPLERS) == ["cps", "dance_sde", "dpm_solver", "flow_sde", "ode", "unipc"]
    for name in SAMPLERS:
        sampler = find_sampler(name)
        assert isinstance(sampler, Sampler)
        assert sampler.name == name
    assert STOCHASTIC_SAMPLERS == ("cps", "dance_sde", "flow_sde")


def test_a_multistep_solver_has_no_transition():
    with pytest.raises(NotImplementedError, match="the sampler dpm_solver has no step"):
        find_sampler("dpm_solver").step(None, None, None, 0, 0.0)
