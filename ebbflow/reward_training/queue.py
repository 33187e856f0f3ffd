"""Generate the pictures that people compare next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import torch

from ebbflow.compute import set_up_process
from ebbflow.data.images import encode_pngs
from ebbflow.data.local_prompts import prepare_local_prompts
from ebbflow.data.prompts import Prompt, write_prompts
from ebbflow.flow.noise import SampleKeys
from ebbflow.labeling.sources import write_queue
from ebbflow.models import Model, load_model
from ebbflow.models.encoding import build_prompt_lookup
from ebbflow.models.hub import locate_pretrained
from ebbflow.models.prepare import cache_base_folder, copy_base_folder, train_base_folder
from ebbflow.progress import show_progress
from ebbflow.recipe import Recipe
from ebbflow.recipe.pretrained import PretrainedSourceConfig
from ebbflow.registry.download import download_champion
from ebbflow.registry.lookup import find_champion
from ebbflow.reward_training.first_policy import train_first_policy
from ebbflow.reward_training.folder import require_reward_model_config
from ebbflow.reward_training.queue_folder import find_queue_folder
from ebbflow.reward_training.select_pairs import select_pairs
from ebbflow.rewards.base import Reward
from ebbflow.rollouts.generate import generate_samples
from ebbflow.seeding import derive_seed, permute_indices
from ebbflow.storage.artifacts import verify_folder
from ebbflow.storage.disk import remove_path
from ebbflow.storage.layout import COPIED_MODELS, QUEUE
from ebbflow.storage.locks import lock_folder
from ebbflow.tracking.store import resolve_tracking_uri
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import read_policy_metadata, write_base_policy
from ebbflow.training.start import write_start_policy

SAMPLES = 3
"""Pictures of a prompt, of which two are compared."""
PROMPTS_AT_ONCE = 16


def generate_queue(
    recipe: Recipe,
    model: Model,
    policy: Policy,
    prompts: Sequence[Prompt],
    reward: Reward | None,
    count: int,
    seed: int,
    path: Path,
) -> int:
    """Generate pictures of prompts with a policy, and write the pairs that people should compare,
    the most informative first; return their number.

    Args:
        policy: the adapters or weights of ``model``.
        reward: the reward model that says how informative a pair is; None takes pairs at random.
        count: number of pairs.
        path: the queue (``ebbflow.labeling.sources.write_queue``).
    """
    encode = build_prompt_lookup(model, prompts)
    sampler = recipe.evaluation.sampler_with_steps
    scores: list[float] = []
    pngs: list[bytes] = []
    repeated: list[Prompt] = []
    starts = range(0, len(prompts), PROMPTS_AT_ONCE)
    for start in show_progress("generating pictures to compare", "batch", starts):
        # All samples of a prompt in one batch: their scores are compared with each other.
        rows = [
            (prompt, sample)
            for prompt in prompts[start : start + PROMPTS_AT_ONCE]
            for sample in range(SAMPLES)
        ]
        batch = [prompt for prompt, _ in rows]
        keys = SampleKeys(
            derive_seed(seed, "queue"),
            [prompt.prompt_id for prompt in batch],
            [sample for _, sample in rows],
        )
        with torch.no_grad(), policy.merge_adapters():
            latents = generate_samples(
                model, encode(batch), keys, sampler, micro_batch=len(batch)
            ).latents
            images = model.decode_latents(latents)
        if reward:
            scores += reward(images, batch).values.tolist()
        pngs += encode_pngs(images)
        repeated += batch
    ids = [prompt.prompt_id for prompt in repeated]
    pairs = select_pairs(ids, scores if reward else None, count, seed)
    write_queue(path, [(repeated[one].prompt, pngs[one], pngs[other]) for one, other in pairs])
    return len(pairs)


def open_queue(recipe: Recipe) -> Path:
    """Return the queue that the last turn of a recipe has left; before the first one, generate one
    with the policy that the recipe starts from, after its stages on data (``only_from_base``).

    Raises:
        RecipeError: the recipe has no reward model, or data that is not on this machine.
        PromptError, DataError: its prompts or its data cannot be used.
        ModelError, TrackingError, PolicyError, HubError: its base model or its start cannot be
            opened.
    """
    config = require_reward_model_config(recipe)
    folder = find_queue_folder(recipe)
    queue = folder / QUEUE
    # What the last turn has left. Without it this is the first turn of the recipe.
    if queue.is_file():
        return queue
    folder.mkdir(parents=True, exist_ok=True)
    set_up_process(recipe)
    # Held-out and validation prompts judge policies, so nobody labels pictures of them.
    table = prepare_local_prompts(recipe)
    prompts = [Prompt(**row) for row in table.to_pylist() if row["split"] == "train"]
    with lock_folder(folder):
        models = folder / COPIED_MODELS / recipe.digest
        models.mkdir(parents=True, exist_ok=True)
        base, policy_folder = _prepare_start(recipe, table, models)
        model, policy = open_served_policy(recipe, base, policy_folder)
        chosen = choose_prompts(prompts, [], config.queue, recipe.seed)
        generate_queue(recipe, model, policy, chosen, None, config.queue, recipe.seed, queue)
        # Only a killed attempt would use them again.
        remove_path(folder / COPIED_MODELS)
    return queue


def choose_prompts(
    prompts: Sequence[Prompt], first: Sequence[str], count: int, seed: int
) -> list[Prompt]:
    """Choose training prompts: those whose text is in ``first``, then random ones."""
    wanted = {text: index for index, text in enumerate(first)}
    order = permute_indices(len(prompts), derive_seed(seed, "prompts to compare"))
    shuffled = [prompts[index] for index in order]
    # Stable: the random order decides among those that are not named.
    shuffled.sort(key=lambda prompt: wanted.get(prompt.prompt, len(wanted)))
    return shuffled[:count]


def open_served_policy(recipe: Recipe, base: Path, folder: Path) -> tuple[Model, Policy]:
    """Open a policy as an evaluation does."""
    metadata = read_policy_metadata(folder)
    model = load_model(
        base, recipe.evaluation.evaluated_model(metadata.served_model), weights_later=True
    )
    policy = Policy(model, metadata.config, recipe.seed)
    policy.load_folder(folder)
    return model, policy


def _prepare_start(recipe: Recipe, prompts: pa.Table, folder: Path) -> tuple[Path, Path]:
    """Return the base model, and the policy that rewards train first: what ``policy.start`` names,
    or the base model after the stages on data.
    """
    store = resolve_tracking_uri(recipe)
    # As the pipeline starts: people should label what the next training begins with.
    if recipe.policy.start == "champion":
        champion = find_champion(store, recipe.promotion.model_name)
        if champion is not None:
            data = download_champion(champion, folder / "champion")
            return data / "base", data / "policy"
    base = folder / "base"
    if not base.exists():
        if recipe.model.path is None:
            train_base_folder(recipe.model.training, recipe.threads, base)
        elif recipe.model.is_on_hub:
            base = cache_base_folder(recipe.model)
        else:
            copy_base_folder(Path(recipe.model.path), base, recipe.model)
    start = recipe.policy.start
    if isinstance(start, PretrainedSourceConfig):
        policy = folder / "start"
        if not policy.exists():
            source = locate_pretrained(start, ["*.safetensors"])
            write_start_policy(recipe, base, source, policy, start.path)
        return base, policy
    policy = folder / "untrained"
    if not policy.exists():
        digest = verify_folder(base)
        write_base_policy(
            policy, digest, recipe.digest, recipe.policy, recipe.model, recipe.evaluation
        )
    stages = folder / "stages"
    stages.mkdir(exist_ok=True)
    write_prompts(prompts, stages / "prompts.parquet")
    return base, train_first_policy(recipe, base, policy, stages / "prompts.parquet", stages)
