"""What a run of a recipe takes: memory of each kind of process, evaluations of the network, bytes
stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from ebbflow.data.model_sizes import (
    BYTES,
    ModelSizes,
    SampleSize,
    Shape,
    count_lora_parameters,
    select_adapted_layers,
)
from ebbflow.estimate.memory import Memory, ProcessMemory, estimate_stage_memory
from ebbflow.estimate.work import PNG_BYTES_PER_PIXEL, Work, estimate_work
from ebbflow.recipe import Recipe
from ebbflow.recipe.evaluation import DRIFT_SIGMAS
from ebbflow.recipe.model import ModelConfig
from ebbflow.stage import StageContext

Measure = Callable[[ModelConfig], tuple[ModelSizes, SampleSize]]


@dataclass(frozen=True)
class Estimate:
    """What a recipe takes.

    Attributes:
        trained: parameters.
        processes: of the training of an offline stage, on each node.
        nodes: of that training.
        hybrid: whether each node has a replica of the model (HSDP), instead of a share of it.
        context_parallel: of those processes, how many share the tokens of a sample.
        evaluated: a sample as an evaluation generates it.
        memory: of one process, by what it does.
        work: of each stage, by its label in the first round.
        evaluations: of policies in a run, at most.
        evaluation: evaluations of the network in one of them.
        stored: bytes that a whole run leaves in the artifact store, by kind.
        main_memory: bytes of the parts that wait on the CPU.
        prompt: bytes of one encoded prompt; each different prompt waits on the CPU.
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
    nodes: int = 1
    hybrid: bool = False
    context_parallel: int = 1


def estimate_recipe(
    recipe: Recipe,
    processes: int = 2,
    nodes: int = 1,
    hybrid: bool = False,
    context_parallel: int = 1,
) -> Estimate:
    """What a recipe needs, with ``processes`` in the training of an offline stage on each of
    ``nodes``.

    Raises:
        SizeError: the base model's sizes are not known.
        ModelError: the family cannot draw the recipe's size.
        ValueError: fewer processes than one.
    """
    if processes < 1:
        raise ValueError(f"processes = {processes}: an offline stage trains with at least one")
    from ebbflow.models.sizes import measure_model  # imports torch

    sizes, sample, evaluated = measure_sizes(recipe, measure_model)
    return estimate_from_sizes(
        recipe, processes, sizes, sample, nodes, hybrid, context_parallel, evaluated
    )


def measure_sizes(recipe: Recipe, measure: Measure) -> tuple[ModelSizes, SampleSize, SampleSize]:
    """The sizes of the base model, a sample of the largest rollouts, and a sample of an evaluation;
    by ``models.sizes.measure_model``.

    Raises:
        SizeError, ModelError: as ``estimate_recipe``.
    """
    drawn = recipe.evaluation.evaluated_model(recipe.model)
    found = [measure(model) for model in recipe.rollout_models]
    sizes, sample = max(found, key=lambda pair: pair[1].tokens)
    evaluated = found[0][1] if drawn == recipe.rollout_models[0] else measure(drawn)[1]
    return sizes, sample, evaluated


def estimate_from_sizes(
    recipe: Recipe,
    processes: int,
    sizes: ModelSizes,
    sample: SampleSize,
    nodes: int = 1,
    hybrid: bool = False,
    context_parallel: int = 1,
    evaluated: SampleSize | None = None,
) -> Estimate:
    """What a recipe needs of a model of these sizes.

    Args:
        evaluated: a sample as an evaluation generates it; left out, ``sample``.

    Raises:
        SizeError: no layer is called as ``policy.targets`` says.
    """
    evaluated = evaluated or sample
    trained = count_trained_parameters(recipe, sizes)
    of = ProcessMemory(recipe, sizes, sample, trained, count_adapted_weights(recipe, sizes))
    contexts = [
        StageContext(recipe, 0, index)
        for index, stage in enumerate(recipe.stages)
        if stage.kind != "custom"
    ]
    work = {ctx.stage_label: estimate_work(ctx, sizes, sample, trained) for ctx in contexts}
    judged = recipe.num_evaluated
    compared = recipe.prompts.validation + recipe.prompts.held_out
    # Of the base model, the champion, and after every stage; of a branch also before its first one.
    evaluations = 2 + recipe.rounds * (len(recipe.stages) + len(recipe.branches))
    return Estimate(
        recipe=recipe,
        sizes=sizes,
        sample=sample,
        evaluated=evaluated,
        trained=trained,
        processes=processes,
        memory={
            "text encoding": of.encoding_memory(),
            "evaluation": replace(of, sample=evaluated).evaluation_memory(),
        }
        | estimate_stage_memory(
            of, contexts, processes * nodes, processes if hybrid else None, context_parallel
        ),
        work=work,
        evaluations=evaluations,
        evaluation=sample.passes
        * (judged * recipe.evaluation.steps + compared * 2 * len(DRIFT_SIGMAS)),
        stored={
            "base model": sizes.stored,
            "rollout shards": recipe.rounds * sum(done.shards for done in work.values()),
            "policies": recipe.rounds * sum(done.policy for done in work.values()),
            "evaluations": evaluations * judged * PNG_BYTES_PER_PIXEL * evaluated.pixels,
        },
        main_memory=BYTES[recipe.model.precision] * sizes.text_encoders + 4 * sizes.vae,
        prompt=of.prompt_bytes,
        nodes=nodes,
        hybrid=hybrid,
        context_parallel=context_parallel,
    )


def count_trained_parameters(recipe: Recipe, sizes: ModelSizes) -> int:
    """Parameters that the recipe trains; of some layers alone, those of the linear ones.

    Raises:
        SizeError: no layer is called as ``policy.targets`` says.
    """
    policy = recipe.policy
    linears = _find_trained_layers(recipe, sizes)
    if policy.train == "lora":
        return count_lora_parameters(
            linears, policy.targets or sizes.lora_targets, policy.rank, policy.dora
        )
    if policy.layers is None:
        return sizes.parameters - sizes.unused
    return sum(inputs * outputs + outputs for inputs, outputs in linears.values())


def count_adapted_weights(recipe: Recipe, sizes: ModelSizes) -> int:
    """Elements of the weights that the recipe's LoRA adapts; none in full training.

    Raises:
        SizeError: no layer is called as ``policy.targets`` says.
    """
    if recipe.policy.train == "full":
        return 0
    adapted = select_adapted_layers(
        _find_trained_layers(recipe, sizes), recipe.policy.targets or sizes.lora_targets
    )
    return sum(inputs * outputs for inputs, outputs in adapted)


def _find_trained_layers(recipe: Recipe, sizes: ModelSizes) -> Mapping[str, Shape]:
    """The linear layers, or those of them that ``policy.layers`` names."""
    if (layers := recipe.policy.layers) is None:
        return sizes.linears
    return {
        name: shape
        for name, shape in sizes.linears.items()
        if any(fnmatchcase(name, layer) for layer in layers)
    }
