"""No pickle is ever read: a planted one never runs, and what only holds pickles is refused, with
how to fix it.
"""

from __future__ import annotations

import ast
import importlib
import json
import pickle
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from ebbflow.data.pairs import PairError, read_pairs
from ebbflow.data.prompt_files import read_prompt_file
from ebbflow.data.prompts import PromptError
from ebbflow.models import ModelError, load_model
from ebbflow.models.prepare import copy_base_folder, download_base_folder
from ebbflow.recipe.base import RecipeError
from ebbflow.recipe.recipe_file import load_recipe
from ebbflow.rewards.combine import RewardError
from ebbflow.rewards.weights import read_weights
from ebbflow.storage.artifacts import COMMIT, MANIFEST, commit_folder, write_new_folder
from ebbflow.storage.tables import read_table
from ebbflow.training.checkpoint import CheckpointError, restore_updater
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import PolicyMetadata
from ebbflow.training.start import write_start_policy
from ebbflow.training.update import PolicyUpdater

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for room in ("ebbflow", "tasks", "workflows", "containers")
    for path in sorted((ROOT / room).rglob("*.py"))
]
PICKLES = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
ONLY_AN_ERROR = {("pickle", "UnpicklingError")}
WITHOUT_WEIGHTS = (
    *("Tokenizer", "TokenizerFast", "Scheduler", "Config"),
    *("Processor", "ProcessorPil", "FeatureExtractor"),
)

# ------------------------------------------------------------------------------------ in the source


def calls(path: Path) -> Iterator[tuple[ast.Call, str, dict[str, ast.expr]]]:
    """Every call of a file: what is called, and its keywords; those of a ``**`` have the key
    ``**``.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield (
                node,
                ast.unparse(node.func),
                {keyword.arg or "**": keyword.value for keyword in node.keywords},
            )


def problems(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (
                f"import {name.name}" for name in node.names if name.name.split(".")[0] in PICKLES
            )
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PICKLES:
            yield from (
                f"from {node.module} import {name.name}"
                for name in node.names
                if (node.module, name.name) not in ONLY_AN_ERROR
            )
    for node, name, keywords in calls(path):
        if name in ("eval", "exec", "os.system", "np.fromfile", "pd.read_pickle"):
            yield ast.unparse(node)
        if name == "torch.load" and not is_true(keywords.get("weights_only")):
            yield ast.unparse(node)
        if name in ("np.load", "numpy.load") and "allow_pickle" in keywords:
            yield ast.unparse(node)
        if is_true(keywords.get("shell")) or is_true(keywords.get("trust_remote_code")):
            yield ast.unparse(node)
        if (
            name.startswith("yaml.")
            and name != "yaml.safe_load"
            and "load" in name
            and not is_safe_loader(path, node)
        ):
            yield ast.unparse(node)
        if name.endswith(".from_pretrained") and not reads_only_safetensors(node, name, keywords):
            yield ast.unparse(node)


def is_true(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


def is_safe_loader(path: Path, call: ast.Call) -> bool:
    if len(call.args) != 2 or not path.is_relative_to(ROOT):
        return False
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    return issubclass(getattr(module, ast.unparse(call.args[1])), yaml.SafeLoader)


def reads_only_safetensors(call: ast.Call, name: str, keywords: dict[str, ast.expr]) -> bool:
    """Options that a ``**`` brings are looked up by the words in the file, which is enough to
    notice when they go.
    """
    kind = name.removesuffix(".from_pretrained")
    return (
        kind.endswith(WITHOUT_WEIGHTS)
        or is_true(keywords.get("use_safetensors"))
        or "**" in keywords
    )


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_line_reads_a_pickle_or_runs_text(path):
    assert list(problems(path)) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from cloudpickle import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.unsafe_load(text)",
        "eval(text)",
        "subprocess.run(command, shell=True)",
        "Model.from_pretrained(folder)",
    ],
)
def test_the_check_would_notice(tmp_path, line):
    path = tmp_path / "source.py"
    path.write_text(line)
    assert list(problems(path))


def test_options_that_come_along_say_safetensors():
    for path in SOURCES:
        named = [
            name
            for _, name, keywords in calls(path)
            if name.endswith(".from_pretrained") and "**" in keywords
        ]
        if [
            name
            for name in named
            if not name.removesuffix(".from_pretrained").endswith(WITHOUT_WEIGHTS)
        ]:
            text = path.read_text()
            assert "use_safetensors=True" in text or '"use_safetensors": True' in text, path


# ------------------------------------------------------------------------------------------ planted


class Planted:
    """Its pickle writes a file when it is read."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self.flag,)


@pytest.fixture
def flag(tmp_path):
    """A file that must not be there at the end of the test; the plant is one that works."""
    flag = tmp_path / "flag"
    pickle.loads(pickle.dumps(Planted(flag)))
    assert flag.exists()
    flag.unlink()
    yield flag
    assert not flag.exists(), "a planted pickle was run"


@pytest.fixture
def plant(flag):
    """``plant(path)``: a pickle at a path, as torch or as the pickle module writes it."""

    def write(path: Path, how: str = "torch") -> Path:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if how == "torch":
                torch.save({"weight": Planted(flag)}, path)
            else:
                path.write_bytes(pickle.dumps(Planted(flag)))
        return path

    return write


def with_pickles(source: Path, folder: Path, plant, replace: bool) -> Path:
    """A copy of a folder with a pickle of each usual name beside its weights, or in their place."""
    shutil.copytree(source, folder)
    for weights in list(folder.rglob("*.safetensors")):
        names = (
            weights.stem,
            "pytorch_model",
            "diffusion_pytorch_model",
            "pytorch_lora_weights",
            "model",
        )
        for name in names:
            for ending in ("bin", "pt", "pth", "ckpt", "pkl"):
                plant(weights.parent / f"{name}.{ending}", "pickle" if ending == "pkl" else "torch")
        np.save(weights.parent / "weights.npy", np.array([{}], dtype=object), allow_pickle=True)
        if replace:
            weights.unlink()
            for index in weights.parent.glob("*.index.json"):
                index.unlink()
    if (folder / COMMIT).exists():
        for name in (MANIFEST, COMMIT):
            (folder / name).unlink()
        commit_folder(folder)
    return folder


def test_a_glyph_base_model(base_folder, plant, tmp_path):
    load_model(with_pickles(base_folder, tmp_path / "beside", plant, replace=False))
    instead = with_pickles(base_folder, tmp_path / "instead", plant, replace=True)
    with pytest.raises(
        ModelError, match=rf"{instead} cannot be read as a glyph base model .*safetensors"
    ):
        load_model(instead)


@pytest.mark.parametrize("family", ["sd3", "wan"])
def test_a_published_base_model(tiny_recipe, family, plant, tmp_path):
    config = tiny_recipe(family).model
    beside = with_pickles(Path(config.path), tmp_path / "beside", plant, replace=False)
    load_model(beside, config)
    instead = with_pickles(Path(config.path), tmp_path / "instead", plant, replace=True)
    with pytest.raises(ModelError, match=rf"{instead}.*safetensors"):
        load_model(instead, config)
    with pytest.raises(ModelError, match="safetensors"):
        copy_base_folder(instead, tmp_path / "copy", config)
    assert not (tmp_path / "copy").exists()


def test_only_text_encoders_of_pickles(tiny_recipe, plant, tmp_path):
    config = tiny_recipe("sd3").model
    folder = tmp_path / "base"
    shutil.copytree(Path(config.path), folder)
    for weights in (folder / "text_encoder").glob("*.safetensors"):
        weights.unlink()
    plant(folder / "text_encoder" / "pytorch_model.bin")
    with pytest.raises(
        ModelError, match=rf"{folder} cannot be read as a sd3 base model .*fetch it again"
    ):
        load_model(folder, config)


def test_code_that_a_base_model_brings_along(tiny_recipe, flag, tmp_path):
    config = tiny_recipe("sd3").model
    folder = tmp_path / "base"
    shutil.copytree(Path(config.path), folder)
    code = f"import pathlib\npathlib.Path({str(flag)!r}).touch()\nclass Own: pass\n"
    for target in (folder / "evil.py", folder / "transformer" / "evil.py", folder / "pipeline.py"):
        target.write_text(code)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"transformer": ["evil", "Own"]}))
    with pytest.raises(ModelError, match=rf"{folder} cannot be read"):
        load_model(folder, config)


def test_only_parts_of_a_pipeline_are_downloaded(tiny_recipe, plant, tmp_path, monkeypatch):
    snapshot = with_pickles(
        Path(tiny_recipe("sd3").model.path), tmp_path / "snapshot", plant, replace=False
    )
    monkeypatch.setattr("ebbflow.models.prepare.locate_pretrained", lambda *_: snapshot)
    download_base_folder("owner/name", "0" * 40, tmp_path / "base")
    endings = {path.suffix for path in (tmp_path / "base").rglob("*") if path.is_file()} - {""}
    assert endings <= {".json", ".safetensors", ".txt", ".model", ".jinja"}


@pytest.mark.parametrize("train", ["full", "lora"])
def test_loading_a_policy_runs_no_pickle(model, make_recipe, plant, tmp_path, train):
    recipe = make_recipe(policy={"train": train})
    policy = Policy(model, recipe.policy, 0)
    policy.ensure_copy("old")
    policy.save_folder(
        tmp_path / "p",
        PolicyMetadata(
            base_digest="b", recipe_digest="r", config=recipe.policy, version=1, copies=("old",)
        ),
    )
    policy.load_folder(
        with_pickles(tmp_path / "p", tmp_path / "beside", plant, replace=False), to_train=True
    )
    instead = with_pickles(tmp_path / "p", tmp_path / "instead", plant, replace=True)
    with pytest.raises(Exception, match=str(instead)):
        policy.load_folder(instead, to_train=True)


def test_loading_a_published_lora_runs_no_pickle(base_folder, make_recipe, plant, tmp_path):
    (tmp_path / "lora").mkdir()
    for name in ("pytorch_lora_weights.bin", "adapter_model.bin", "lora.pt"):
        file = plant(tmp_path / "lora" / name)
        for source in (file, tmp_path / "lora"):
            recipe = make_recipe(
                policy={"train": "lora", "rank": 2, "start": {"path": str(source)}}
            )
            with pytest.raises(
                Exception,
                match=rf"policy\.start: .*{tmp_path}/lora.*safetensors|cannot be read as a LoRA",
            ):
                write_start_policy(recipe, base_folder, source, tmp_path / "start", None)
    assert not (tmp_path / "start").exists()


@pytest.mark.parametrize("how", ["torch", "pickle"])
@pytest.mark.parametrize("ending", ["pt", "pth", "bin", "pkl", "safetensors"])
def test_weights_of_a_reward(plant, tmp_path, how, ending):
    file = plant(tmp_path / f"head.{ending}", how)
    with pytest.raises(RewardError, match=str(file)):
        read_weights(file)


def pickled_type(flag: Path) -> pa.Schema:
    """A schema whose column says that it is of the extension type which Arrow once made by reading
    a pickle.
    """
    extension = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Planted(flag)),
    }
    about = {b"pandas": pickle.dumps(Planted(flag)), b"ebbflow": pickle.dumps(Planted(flag))}
    return pa.schema([pa.field("prompt", pa.string(), metadata=extension)], metadata=about)


def test_reading_a_table_runs_no_pickle(flag, tmp_path):
    file = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"prompt": ["a"] * 9}).cast(pickled_type(flag)), file)
    assert read_table(file)["prompt"].to_pylist() == ["a"] * 9
    rows, _ = read_prompt_file(file)
    assert len(rows) == 1


@pytest.mark.parametrize(
    "name",
    [
        "prompts.npy",
        "prompts.pkl",
        "prompts.parquet",
        "prompts.jsonl",
        "prompts.csv",
        "prompts.txt",
    ],
)
def test_prompts_and_pairs_that_are_pickles(plant, tmp_path, name):
    file = plant(tmp_path / name, "pickle")
    with pytest.raises(PromptError, match=name):
        read_prompt_file(file)
    with pytest.raises(PairError, match=name):
        list(read_pairs(file))


def test_a_recipe_in_yaml(flag, tmp_path):
    file = tmp_path / "recipe.yaml"
    for tag in (
        "!!python/object/apply:pathlib.Path.touch",
        "!!python/name:os.system",
        "!!python/object/new:os.system",
    ):
        file.write_text(f"name: {tag} ['{flag}']\n")
        with pytest.raises(RecipeError, match="recipe.yaml:1:7: not valid YAML"):
            load_recipe(file)


def test_loading_a_checkpoint_runs_no_pickle(model, make_recipe, plant, tmp_path):
    recipe = make_recipe()
    updater = PolicyUpdater(Policy(model, recipe.policy, 0), recipe.stages[0])
    with write_new_folder(tmp_path / "step-00002") as unfinished:
        for name in ("optimizer.pt", "parameters.bin", "policy.pkl", "state.pkl", "learner.pt"):
            plant(unfinished / name)
    with pytest.raises((CheckpointError, FileNotFoundError, IndexError)):
        restore_updater(tmp_path / "step-00002", updater)
