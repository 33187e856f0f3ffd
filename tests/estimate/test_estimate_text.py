"""What people read of an estimate, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ebbflow.cli import main
from ebbflow.data.model_sizes import SizeError, count_lora_parameters
from ebbflow.estimate.run import estimate_recipe
from ebbflow.estimate.text import GIB, describe_estimate
from ebbflow.models import ModelError
from ebbflow.models.sizes import measure_model
from ebbflow.recipe import Recipe, load_recipe

RECIPES = Path(__file__).parents[2] / "workflows" / "recipes"


def test_workers_of_their_own_hold_what_their_role_needs(tiny_recipe):
    """Rollouts need neither optimiser nor rewards, training neither rewards nor a VAE, and ranks
    share the model.
    """
    scored = {"rewards": [{"name": "pickscore"}], "guardrails": []}
    stage = {"kind": "online", "sampler": {"name": "flow_sde", "steps": 4}}
    roles = {}
    for count in (1, 2):
        apart = {"placement": "ray", "resources": {"training": {"count": count}}}
        roles[count] = estimate_recipe(tiny_recipe("sd3", **scored, stages=[stage | apart])).memory
    together = estimate_recipe(tiny_recipe("sd3", **scored, stages=[stage])).memory[
        "1.1 online training"
    ]
    alone, shared = (roles[count]["1.1 online training"] for count in (1, 2))
    rollout, judge = (roles[1][f"1.1 online {role}"] for role in ("rollout", "rewards"))
    assert judge.peak_bytes == together.others > 0
    assert (rollout.optimizer, rollout.others, alone.others) == (0, 0, 0)
    assert alone.optimizer == together.optimizer == 2 * shared.optimizer
    assert alone.peak_bytes < together.peak_bytes
    assert shared.loading == alone.weights // 2, "a rank reads its shard"


def test_guards_are_there_where_a_stage_validates(tiny_recipe):
    scored = {"rewards": ["jpeg_compressibility"], "guardrails": [{"name": "clipscore"}]}
    stage = {"kind": "online", "sampler": {"name": "flow_sde", "steps": 4}}
    for placement, label in (("in_process", "1.1 online training"), ("ray", "1.1 online rewards")):
        for watched, bytes_kept in (({}, 0), ({"validation": {}}, 4 * 427_616_513)):
            recipe = tiny_recipe(
                "sd3", **scored, stages=[stage | watched | {"placement": placement}]
            )
            assert estimate_recipe(recipe).memory[label].others == bytes_kept


def test_rollouts_of_other_weights_are_scored_again_by_the_policy(tiny_recipe):
    """An evaluation of the network for every trained step of every sample; without log-probs there
    is nothing to score.
    """
    grpo = {
        "algorithm": {"name": "mix_grpo"},
        "sampler": {"name": "flow_sde"},
        "window": {"kind": "fixed", "size": 2},
    }
    nft = {"algorithm": {"name": "diffusion_nft"}, "sampler": {"name": "ode"}}
    for keys, trained_steps in ((grpo, 2), (nft, 0)):
        stage = {"kind": "online", "steps": 2, "prompts_per_step": 3, "group_size": 4, **keys}
        modes = [
            estimate_recipe(tiny_recipe("sd3", stages=[stage | {"mode": mode}]))
            for mode in ("sync", "one_step_off")
        ]
        sync, late = (made.work["1.1 online"].comparing for made in modes)
        assert late - sync == 2 * 3 * 4 * trained_steps * modes[0].sample.passes


def test_a_loss_without_guidance_evaluates_the_network_once_and_scores_the_rollouts_again(
    tiny_recipe,
):
    grpo = {
        "algorithm": {"name": "mix_grpo"},
        "sampler": {"name": "flow_sde"},
        "window": {"kind": "fixed", "size": 2},
    }
    stage = {
        "kind": "online",
        "steps": 2,
        "prompts_per_step": 3,
        "group_size": 4,
        "reference": {"weight": 0.1},
        **grpo,
    }
    inside, outside = (
        estimate_recipe(
            tiny_recipe("sd3", {"guidance": 4.5}, stages=[stage | {"guidance_in_loss": keep}])
        )
        for keep in (True, False)
    )
    before, after = (made.work["1.1 online"] for made in (inside, outside))
    rows = 2 * 3 * 4 * 2
    assert (before.denoising, before.training, before.comparing) == (
        after.denoising,
        2 * rows,
        2 * rows,
    )
    assert (after.training, after.comparing) == (rows, rows + rows)


@pytest.mark.parametrize("reuse", [False, True])
def test_negative_prompts_without_gradient_are_evaluated_forwards_alone(tiny_recipe, reuse):
    stage = {
        "kind": "online",
        "steps": 2,
        "prompts_per_step": 3,
        "group_size": 4,
        "updates_per_step": 1,
        "sampler": {"steps": 4},
        "window": {"kind": "fixed", "size": 2},
        "reuse_rollout_forward": reuse,
    }
    whole, split = (
        estimate_recipe(
            tiny_recipe("sd3", {"guidance": 4.5}, stages=[stage | {"negative_gradient": keep}])
        )
        for keep in (True, False)
    )
    before, after = (made.work["1.1 online"] for made in (whole, split))
    rows = 2 * 3 * 4 * 2
    assert before.training == 2 * rows
    # The rollout whose passes are reused has evaluated them, and counts them already.
    repeated = 0 if reuse else rows
    assert (after.training, after.comparing) == (rows, before.comparing + repeated)
    assert after.denoising == before.denoising
    kept = [made.memory["1.1 online training"].activations for made in (whole, split)]
    assert 0.5 < kept[1] / kept[0] < 0.8


def test_the_text_names_the_numbers():
    recipe = load_recipe(RECIPES / "sd35_medium_ocr_512.yaml")
    made = estimate_recipe(recipe, processes=4)
    text = describe_estimate(made)
    total = made.memory["1.1 online training"].peak_bytes
    for words in (
        "2,243,171,520 parameters in 24 blocks of width 1536",
        "18,776,064 (a LoRA of rank 32)",
        "16 x 64 x 64, 1229 tokens, 205 of text",
        "processes in an offline or a colocated stage: 4",
        f"{total / GIB:.2f}",
        "69,120",
        "base model",
    ):
        assert words in text


def test_the_command_prints_the_text(monkeypatch):
    recipe = RECIPES / "tiny.yaml"
    monkeypatch.setenv("EBBFLOW_TRAIN_PROCESSES", "3")
    for given, processes in ([], 3), (["--processes", "8"], 8):
        result = CliRunner().invoke(main, ["estimate", str(recipe), *given])
        assert result.exit_code == 0
        assert (
            result.output
            == describe_estimate(estimate_recipe(load_recipe(recipe), processes)) + "\n"
        )


def test_the_command_refuses_with_the_reason(tmp_path):
    (tmp_path / "far.yaml").write_text("model: {family: sd3, path: nowhere}\n")
    result = CliRunner().invoke(main, ["estimate", str(tmp_path / "far.yaml")])
    assert result.exit_code == 1
    assert "download it and name its folder" in result.output


def test_pairs_are_named_as_not_counted(make_recipe):
    recipe = make_recipe(offline={"algorithm": {"name": "diffusion_dpo"}, "pairs": "pairs.parquet"})
    made = estimate_recipe(recipe)
    assert made.work["1.2 offline"].samples == made.work["1.2 offline"].training == 0
    assert "1.2 offline rollout" not in made.memory
    assert "Pairs and data from files are not counted." in describe_estimate(made)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            {"family": "sd3", "path": "nowhere"},
            r"'nowhere' no sizes are known.*stable-diffusion-3.5-medium.*name its folder",
        ),
        (
            {"family": "sd3", "path": "some/body", "revision": "0" * 40},
            r"'some/body' no sizes are known",
        ),
        (
            {"family": "flux3", "path": "some/body", "revision": "0" * 40},
            r"'some/body' no sizes are known: it is no folder here; download it",
        ),
        (
            {"family": "examples.mine.shifted:ShiftedGlyph", "path": "x"},
            r"your own, no sizes are known",
        ),
    ],
)
def test_a_model_of_unknown_size_is_named(model, says):
    with pytest.raises(SizeError, match=says):
        measure_model(Recipe.model_validate({"model": model}).model)


def test_a_folder_that_is_no_model_is_named(tmp_path):
    (tmp_path / "transformer").mkdir()
    recipe = Recipe.model_validate({"model": {"family": "sd3", "path": str(tmp_path)}})
    with pytest.raises(
        ModelError, match="model_index.json missing; give the folder of a StableDiffusion3Pipeline"
    ):
        estimate_recipe(recipe)
    parts = {
        part: ["diffusers", kind]
        for part, kind in (("transformer", "SD3Transformer2DModel"), ("vae", "AutoencoderKL"))
    }
    (tmp_path / "model_index.json").write_text(
        json.dumps({"_class_name": "StableDiffusion3Pipeline"} | parts)
    )
    with pytest.raises(
        ModelError, match=r"transformer/config.json is missing.*fetch the folder again"
    ):
        estimate_recipe(recipe)


def test_layers_that_are_not_there_are_named():
    with pytest.raises(
        SizeError, match="no layer of the transformer is called to_x; see policy.targets"
    ):
        count_lora_parameters({"attn.to_q": (4, 4)}, ["to_x"], 4)


def test_a_size_that_the_family_cannot_draw_is_refused():
    recipe = load_recipe(RECIPES / "flux_dev.yaml")
    odd = recipe.model_copy(update={"model": recipe.model.model_copy(update={"height": 500})})
    with pytest.raises(ModelError, match="model.height = 500"):
        estimate_recipe(odd)


def test_no_processes_are_refused():
    with pytest.raises(ValueError, match="processes = 0"):
        estimate_recipe(Recipe(), processes=0)
