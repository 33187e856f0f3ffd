"""What a run of a recipe takes: memory of each kind of process, evaluations of the network, bytes
stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from ebbflow.data.model_sizes import (
    ModelSizes,
    SampleSize,
    Shape,
    count_lora_parameters,
    select_adapted_layers,
)
from ebbflow.estimate.main_memory import (
    add_encoding,
    count_encoded_prompts,
    count_evaluated_prompts,
    count_part_bytes,
)
from ebbflow.estimate.measured import measure_cached
from ebbflow.estimate.memory import Memory, ProcessMemory
from ebbflow.estimate.stage_memory import estimate_stage_memory
from ebbflow.estimate.work import PNG_BYTES_PER_PIXEL, Work, estimate_work
from ebbflow.recipe import Recipe
from ebbflow.recipe.evaluation import DRIFT_SIGMAS
from ebbflow.recipe.model import ModelConfig
from ebbflow.stage import StageContext

Sharding = Literal["full", "hybrid", "replicated"]
Measure = Callable[[ModelConfig], tuple[ModelSizes, SampleSize]]


@dataclass(frozen=True)
class Estimate:
    """What a recipe takes.

    Attributes:
        sample: the largest sample that rollouts generate.
        evaluated: a sample as an evaluation generates it.
        trained: number of trained parameters.
        processes: number of processes per node that train an offline stage or run a colocated one.
        nodes: number of nodes of these processes.
        sharding: ``train_sharding`` of the deployment: over which of them the model is sharded.
        context_parallel: number of those processes that share the tokens of a sample.
        memory: memory of one process, by what it does.
        work: work of each stage, by its label in the first round.
        evaluations: number of policies that a run evaluates, at most.
        evaluation: evaluations of the network in one evaluation of a policy.
        stored: bytes that a whole run leaves in the artifact store, by kind.
        main_memory: bytes of text encoders and VAE, which wait in main memory.
        prompt: bytes of one encoded prompt; each different prompt waits in main memory.
        embeddings: bytes of the encoded prompts that a stage or an evaluation has at a time, the
            largest one, in files of its machine, if all of its prompts differ.

    Example:
        ``ebbflow estimate workflows/recipes/tiny.yaml`` prints these::

            estimate.memory["1.1 online training"].peak_bytes
            estimate.work["1.1 online"].samples
            estimate.stored  # {"base model": ..., "rollout shards": ..., "policies": ..., ...}
    """

    recipe: Recipe
    sizes: ModelSizes
    sample: SampleSize
    evaluated: SampleSize
    trained: int
    processes: int
    memory: dict[str, Memory]
    work: dict[str, Work]
    evaluations: int
    evaluation: int
    stored: dict[str, int]
    main_memory: int
    prompt: int
    embeddings: int
    nodes: int = 1
    sharding: Sharding = "full"
    context_parallel: int = 1


def estimate_recipe(
    recipe: Recipe,
    processes: int = 2,
    nodes: int = 1,
    sharding: Sharding = "full",
    context_parallel: int = 1,
) -> Estimate:
    """Return what a recipe needs if ``processes`` processes on each of ``nodes`` nodes train its
    offline stages and run its colocated ones.

    Raises:
        SizeError: the base model's sizes are not known.
        ModelError: the family cannot generate the recipe's size.
        ValueError: fewer processes than one.
    """
    if processes < 1:
        raise ValueError(f"processes = {processes}: an offline stage trains with at least one")
    sizes, sample, evaluated = measure_sizes(recipe, measure_cached)
    return estimate_from_sizes(
        recipe, processes, sizes, sample, nodes, sharding, context_parallel, evaluated
    )


def measure_sizes(recipe: Recipe, measure: Measure) -> tuple[ModelSizes, SampleSize, SampleSize]:
    """Return the sizes of the base model, the largest sample of rollouts, and a sample of an
    evaluation.

    Args:
        measure: ``models.sizes.measure_model``, or ``measure_cached``.

    Raises:
        SizeError, ModelError: as ``estimate_recipe``.
    """
    rollout_models = recipe.rollout_models
    measurements = [measure(model) for model in rollout_models]
    sizes, sample = max(measurements, key=lambda measurement: measurement[1].tokens)
    evaluated_model = recipe.evaluation.evaluated_model(recipe.model)
    # A measurement takes seconds: most recipes evaluate in the size of their rollouts.
    if evaluated_model == rollout_models[0]:
        return sizes, sample, measurements[0][1]
    return sizes, sample, measure(evaluated_model)[1]


def estimate_from_sizes(
    recipe: Recipe,
    processes: int,
    sizes: ModelSizes,
    sample: SampleSize,
    nodes: int = 1,
    sharding: Sharding = "full",
    context_parallel: int = 1,
    evaluated: SampleSize | None = None,
) -> Estimate:
    """Return what a recipe needs of a model of these sizes.

    Args:
        evaluated: a sample as an evaluation generates it; default: ``sample``.

    Raises:
        SizeError: no layer has a name of ``policy.targets``.
    """
    evaluated = evaluated or sample
    trained = count_trained_parameters(recipe, sizes)
    contexts = _list_estimated_stages(recipe)
    adapted = count_adapted_weights(recipe, sizes)
    process_memory = ProcessMemory(recipe, sizes, sample, trained, adapted)
    parts = count_part_bytes(process_memory)
    memory = _estimate_task_memory(process_memory, evaluated) | estimate_stage_memory(
        process_memory,
        contexts,
        processes * nodes,
        {"full": None, "hybrid": processes, "replicated": 1}[sharding],
        context_parallel,
    )
    work = {ctx.stage_label: estimate_work(ctx, sizes, sample, trained) for ctx in contexts}
    # The base model, the champion, and the policy after every stage; a branch also evaluates the
    # policy that it starts from.
    num_trained = sum(map(recipe.count_rounds, range(len(recipe.stages))))
    evaluations = 2 + num_trained + recipe.rounds * len(recipe.branches)
    return Estimate(
        recipe=recipe,
        sizes=sizes,
        sample=sample,
        evaluated=evaluated,
        trained=trained,
        processes=processes,
        memory=memory,
        work=work,
        evaluations=evaluations,
        evaluation=_count_evaluation_passes(recipe, sample),
        stored=_count_stored_bytes(recipe, contexts, sizes, work, evaluations, evaluated),
        main_memory=parts,
        prompt=process_memory.prompt_bytes,
        embeddings=process_memory.prompt_bytes
        * max([count_evaluated_prompts(recipe), *map(count_encoded_prompts, contexts)]),
        nodes=nodes,
        sharding=sharding,
        context_parallel=context_parallel,
    )


def _estimate_task_memory(process: ProcessMemory, evaluated: SampleSize) -> dict[str, Memory]:
    """Return the memory of the tasks outside of stages, by their names in the table."""
    tasks = {
        "text encoding": process.encoding_memory(),
        "evaluation": replace(process, sample=evaluated).evaluation_memory(),
    }
    parts = count_part_bytes(process)
    # Each is one process with the whole model, whatever shares the stages' models.
    return {
        name: add_encoding(process, replace(task, waiting=parts), 1) for name, task in tasks.items()
    }


def _list_estimated_stages(recipe: Recipe) -> list[StageContext]:
    """List the stages of a round whose needs are known: all but a user's own."""
    return [
        StageContext(recipe, 0, index)
        for index, stage in enumerate(recipe.stages)
        if stage.kind != "custom"
    ]


def _count_evaluation_passes(recipe: Recipe, sample: SampleSize) -> int:
    """Return the evaluations of the network in one evaluation of a policy."""
    denoising = recipe.num_evaluated * recipe.evaluation.steps
    # The drift compares the policy with the base model, on one sample of every prompt.
    # Two predictions at each noise level: the policy's and the base model's.
    drift = (recipe.prompts.validation + recipe.prompts.held_out) * 2 * len(DRIFT_SIGMAS)
    return sample.passes * (denoising + drift)


def _count_stored_bytes(
    recipe: Recipe,
    contexts: Sequence[StageContext],
    sizes: ModelSizes,
    work: Mapping[str, Work],
    evaluations: int,
    evaluated: SampleSize,
) -> dict[str, int]:
    images = evaluations * recipe.num_evaluated
    shards = 0
    policies = 0
    for ctx in contexts:
        rounds = recipe.count_rounds(ctx.stage)
        shards += rounds * work[ctx.stage_label].shards
        policies += rounds * work[ctx.stage_label].policy
    return {
        "base model": sizes.stored,
        "rollout shards": shards,
        "policies": policies,
        "evaluations": images * PNG_BYTES_PER_PIXEL * evaluated.pixels,
    }


def count_trained_parameters(recipe: Recipe, sizes: ModelSizes) -> int:
    """Return the number of parameters that the recipe trains. With ``policy.layers``, only those
    of linear layers count.

    Raises:
        SizeError: no layer has a name of ``policy.targets``.
    """
    policy = recipe.policy
    linears = find_trained_layers(recipe, sizes)
    if policy.train == "lora":
        return count_lora_parameters(
            linears, policy.targets or sizes.lora_targets, policy.rank, policy.dora
        )
    if policy.layers is None:
        # Unused parameters have no effect on the output, and so no gradient.
        return sizes.parameters - sizes.unused
    # Weights and biases.
    return sum(inputs * outputs + outputs for inputs, outputs in linears.values())


def count_adapted_weights(recipe: Recipe, sizes: ModelSizes) -> int:
    """Return the number of elements of the weights that the recipe's LoRA adapts; 0 in full
    training.

    Raises:
        SizeError: no layer has a name of ``policy.targets``.
    """
    if recipe.policy.train == "full":
        return 0
    adapted = select_adapted_layers(
        find_trained_layers(recipe, sizes), recipe.policy.targets or sizes.lora_targets
    )
    return sum(inputs * outputs for inputs, outputs in adapted)


def find_trained_layers(recipe: Recipe, sizes: ModelSizes) -> Mapping[str, Shape]:
    """Return the linear layers that ``policy.layers`` names; all of them without it."""
    layers = recipe.policy.layers
    if layers is None:
        return sizes.linears
    return {
        name: shape
        for name, shape in sizes.linears.items()
        if any(fnmatchcase(name, layer) for layer in layers)
    }
