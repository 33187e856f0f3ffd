"""A glyph model with random weights, a recipe of seconds, and a reward that costs nothing: what the
numerical tests run on.
"""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from hypothesis import settings

from benchmarks.tiny_models import build_tiny
from ebbflow.data.prompts import Prompt
from ebbflow.estimate import measured
from ebbflow.flow.noise import SampleKeys
from ebbflow.models import Model, load_model
from ebbflow.models.families import glyph
from ebbflow.models.families.glyph import build_glyph_model
from ebbflow.recipe import Recipe
from ebbflow.recipe.model import GlyphTrainingConfig
from ebbflow.rewards.base import Reward, RewardResult
from ebbflow.rewards.combine import Scorer
from ebbflow.rollouts.parity import measure_parity, plan_parity_samples
from ebbflow.storage.artifacts import write_new_folder
from ebbflow.tracking import empty_store
from tests.forked import is_fork_server_a_fork_of_this_process, stop_fork_server
from tests.glyph_stages import small_stage
from tests.mlflow_settings import read_tracking_uri
from tests.printed_results import register_result_printer

os.environ["FLYTE_LOCAL_CACHE_ENABLED"] = "false"
# A test writes into the store that it names, never into that of the shell it was started from.
os.environ.pop("MLFLOW_TRACKING_URI", None)
os.environ["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] = "false"
torch.set_num_threads(1)
settings.register_profile("ebbflow", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ebbflow")

TINY_SIZES = {
    "sd3": (64, 64),
    "flux": (64, 96),
    "qwen_image": (64, 64),
    "qwen_image_edit": (64, 64),
    "wan": (64, 96),
}


SLOWEST_FIRST = [
    "test_doc_blocks",
    "test_pods",
    "test_again",
    "test_ray_workers",
    "test_post_train",
    "test_ray",
    "test_verification",
    "test_shared_tokens",
    "test_aspect_ratios",
    "test_compile",
    "test_colocated",
    "test_memory_count",
    "test_verify_again",
    "test_killed",
    "test_reused_forward",
    "test_killed_turn",
    # Of `make test-flyte`; without a Flyte they are skipped.
    "test_schedule",
    "test_operators",
    "test_run",
    "test_interruptions",
    "test_ray_pods",
]
"""Files that take half a minute or minutes: first, or all cores but one would wait for the last of
them.
"""


WORKER_MEMORY = 4 * 2**30
"""Bytes of a worker and of what its tests start and write, generously."""


NEW_OBJECTS = 100_000
"""After which Python looks for garbage among them; its default is 700."""


@pytest.hookimpl(trylast=True)  # the terminal reporter is registered by a hook of its own
def pytest_configure(config: pytest.Config) -> None:
    register_result_printer(config)


def pytest_xdist_auto_num_workers() -> int | None:
    """Count the workers of ``--numprocesses auto``: three for two cores, where memory has room.

    Tests wait for servers, for other processes and for limits that they set.
    """
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None  # xdist's own hook reads it
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(cores + cores // 2, max(cores, memory // WORKER_MEMORY))


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave what the tests import out of all garbage collections: it stays to the end, and a search
    through its millions of objects takes half a second each time. Look for garbage less often, too:
    most tests load a model, whose objects start a search each time that 700 are new.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, 20, 100)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(
        key=lambda item: (
            SLOWEST_FIRST.index(item.path.stem)
            if item.path.stem in SLOWEST_FIRST
            else len(SLOWEST_FIRST)
        )
    )


@pytest.fixture(autouse=True)
def tracking_uri_is_left_as_found() -> Iterator[None]:
    """Fails a test that leaves MLflow's tracking URI changed.

    Later tests of the same process would write into that store, and fail far from the cause.
    """
    before = read_tracking_uri()
    yield
    after = read_tracking_uri()
    assert after == before, f"This test changed MLflow's tracking URI: {before!r}, now {after!r}."


@pytest.fixture(autouse=True)
def fork_server_is_no_fork_of_pytest() -> Iterator[None]:
    """Fails a test whose task leaves pytest's process as the server that later programs and ranks
    are forked from.

    They would hang or fail, far from the cause, and only in the order that one run happens to have.
    """
    yield
    if is_fork_server_a_fork_of_this_process():
        stop_fork_server()
        pytest.fail(
            "The fork server is a fork of pytest: call the task in separate_fork_server()"
            " (tests/forked.py)."
        )


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all processes of this test session share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(autouse=True)
def sizes_cache(session_folder: Path) -> Iterator[None]:
    """Measures and checks base models anew in each session, and leaves nothing in the user's cache.

    The other caches stay the user's: recognisers and downloads take minutes.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured, "cache_folder", lambda: session_folder / "sizes")
        yield


@pytest.fixture(scope="session", autouse=True)
def stores_cache(session_folder: Path) -> Iterator[None]:
    """Makes an empty MLflow store once for a session; of the session, as fixtures of all scopes
    make stores.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(empty_store, "cache_folder", lambda: session_folder / "stores")
        yield


@pytest.fixture(scope="session", autouse=True)
def glyph_networks() -> Iterator[None]:
    """Gives each load of a glyph model copies of the networks that the first one has read: the
    libraries take fifteen times as long, hundreds of times.

    Everything else of a load is done again: the folder is verified, and its other parts are read.
    """
    read_network = glyph._read_network

    @lru_cache(maxsize=16)
    def read_once(kind: Any, folder: Path, files: tuple[tuple[str, int, int, int], ...]) -> Any:
        return read_network(kind, folder)

    def copy_network(kind: Any, folder: Path) -> Any:
        # A test that changes a file gets what the file says then.
        stats = [(path.name, path.stat()) for path in sorted(folder.glob("*"))]
        files = tuple((name, stat.st_ino, stat.st_size, stat.st_ctime_ns) for name, stat in stats)
        return copy.deepcopy(read_once(kind, folder, files))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(glyph, "_read_network", copy_network)
        yield


class Darkness(Reward):
    """Stub reward: the mean darkness of the image in [0, 1]; fails on the prompts whose target is
    ``FAIL``.
    """

    has_gradient = True

    name = "darkness"

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        values = 1 - images.mean((1, 2, 3)) / 255
        failures = {
            index: "made to fail" for index, prompt in enumerate(prompts) if prompt.target == "FAIL"
        }
        values[list(failures)] = np.nan
        return RewardResult(values, {"brightness": 1 - values}, failures)

    def score_with_gradient(self, images: torch.Tensor, prompts: Sequence[Prompt]) -> torch.Tensor:
        return 1 - images.mean((1, 2, 3))


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A committed base-model folder with random weights. Never write into it.

    The transformer has one block instead of three, and so a third of the cost, which is most of
    what the numerical tests cost.
    """
    folder = tmp_path_factory.mktemp("models") / "base"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_glyph_model(GlyphTrainingConfig())
        model.transformer = SD3Transformer2DModel.from_config(
            {**model.transformer.config, "num_layers": 1}
        )
    with write_new_folder(folder) as unfinished:
        model.save(unfinished)
    return folder


@pytest.fixture
def model(base_folder: Path) -> Model:
    """A model of this test alone: policies change it."""
    return load_model(base_folder)


@pytest.fixture(scope="session")
def open_pipeline() -> Callable[[Path], StableDiffusion3Pipeline]:
    """``open_pipeline(folder)``: diffusers' pipeline of a base-model folder, without the parts that
    the glyph family lacks.
    """

    def open_folder(folder: Path) -> StableDiffusion3Pipeline:
        absent = ("vae", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")
        pipeline = StableDiffusion3Pipeline.from_pretrained(folder, **dict.fromkeys(absent))
        pipeline.set_progress_bar_config(disable=True)
        pipeline.vae_scale_factor = 1
        return pipeline

    return open_folder


@pytest.fixture(scope="session")
def scorer() -> Scorer:
    return Scorer(((Darkness(), 1.0),))


@pytest.fixture(scope="session")
def make_prompts() -> Callable[..., list[Prompt]]:
    """``make_prompts(3)``: training prompts with ids 0, 1, 2 and four-letter targets; ``split`` as
    asked.
    """

    def make(count: int, split: str = "train") -> list[Prompt]:
        letters = np.random.default_rng(5).integers(
            ord("A"), ord("Z") + 1, (count, 4), dtype=np.uint8
        )
        targets = [row.tobytes().decode() for row in letters]
        return [
            Prompt(index, f'"{text}"', "", text, "test", split, "{}")
            for index, text in enumerate(targets)
        ]

    return make


@pytest.fixture(scope="session")
def make_recipe() -> Callable[..., Recipe]:
    """``make_recipe(online={...}, offline={...}, **rest)``: a recipe with an online and an offline
    stage that take seconds.

    What is not given is small, and otherwise as ``small_stage`` has it.
    """
    moving = ("mix_grpo", "flow_dppo", "distillation")

    def make(
        online: dict[str, Any] | None = None, offline: dict[str, Any] | None = None, **rest: Any
    ) -> Recipe:
        small = {"group_size": 4, "micro_batch": 8}
        first = {
            "kind": "online",
            **small,
            "steps": 2,
            "prompts_per_step": 2,
            "updates_per_step": 1,
            "sampler": {"steps": 4},
        }
        if (online or {}).get("algorithm", {"name": "mix_grpo"})["name"] in moving:
            first["window"] = {"size": 2, "steps_per_window": 1}
        second = {
            "kind": "offline",
            **small,
            "prompts": 4,
            "shards": 2,
            "epochs": 2,
            "batch_size": 8,
            "sampler": {"name": "ode", "steps": 3},
        }
        stages = [small_stage(first | (online or {})), small_stage(second | (offline or {}))]
        return Recipe.model_validate(
            {"stages": stages, "evaluation": {"steps": 3, "samples": 1}, **rest}
        )

    return make


@pytest.fixture(scope="session")
def make_keys() -> Callable[..., SampleKeys]:
    """``make_keys(6)``: six keys, two samples for each prompt."""

    def make(count: int, seed: int = 3) -> SampleKeys:
        return SampleKeys(
            seed, [index // 2 for index in range(count)], [index % 2 for index in range(count)]
        )

    return make


@pytest.fixture(scope="session")
def through_the_gate() -> Callable[..., dict[str, float]]:
    """``through_the_gate(engine, policy, conditioning, keys, sampler, parity)``: generated and
    measured as in a stage.
    """

    def measure(
        engine: Any,
        policy: Any,
        conditioning: Any,
        keys: SampleKeys,
        sampler: Any,
        parity: Any,
        micro_batch: int = 64,
    ) -> dict[str, float]:
        some = slice(0, parity.samples)
        conditioning, keys, (sampler, plan) = (
            conditioning.select_rows(some),
            keys.select_samples(some),
            plan_parity_samples(sampler),
        )
        rollouts, _ = engine.generate(conditioning, keys, sampler, plan)
        return measure_parity(
            policy,
            rollouts.trajectory,
            conditioning,
            keys,
            sampler,
            parity,
            micro_batch=micro_batch,
        )

    return measure


@pytest.fixture(scope="session")
def tiny_recipe(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recipe]:
    """``tiny_recipe(family)``: a recipe on the tiny model of a published layout; ``model`` and
    further keys as asked.
    """
    folders: dict[str, Path] = {}

    def make(family: str, model: dict[str, Any] | None = None, **rest: Any) -> Recipe:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp("tiny") / family
            build_tiny(family, folders[family])
        height, width = TINY_SIZES.get(family, (64, 64))
        base = {"family": family, "path": str(folders[family]), "height": height, "width": width}
        stages = {
            "stages": [
                small_stage(stage)
                for stage in rest.get("stages", [{"kind": "online"}, {"kind": "offline"}])
            ]
        }
        return Recipe.model_validate({"model": base | (model or {}), **rest, **stages})

    return make
