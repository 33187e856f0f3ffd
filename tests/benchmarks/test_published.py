"""Published values: how they are read from files, and that each one has an entry."""

from __future__ import annotations

import subprocess

import pytest

from benchmarks import published
from benchmarks.published import (
    DIFFERS,
    EQUAL,
    NOT_FOUND,
    WRONG,
    Comparison,
    convert,
    count_states,
    find_gaps,
    format_report,
    is_equal,
    list_entries,
    list_recipe_entries,
    list_recipe_values,
    read_data,
)
from benchmarks.published_values import MISSING, extract_value
from benchmarks.sources import Clones
from ebbflow.recipe.algorithms import PublishedSetting
from ebbflow.recipe.defaults import list_published_defaults
from ebbflow.recipe.registry import ALGORITHMS

YAML = """
train:
  learning_rate: 3.0e-4
  small: 1e-5
  steps: [1, 2, 3]
  decay: "0-0.25-0.005-0.999"
"""
TOML = """
[model.rl]
beta = 0.01
[[model.parts]]
rate = 0.1
[[model.parts]]
rate = 0.2
"""
PYTHON = '''
config.train.beta = 1

def base():
    train.lr = 3e-4
    sizes: int = 48

def other(n_gpus=8):
    if n_gpus:
        config.guidance = 4.5
    config.guidance = 1.0
    config.train.beta = 0.01 * 2
    config.flag = True
    return ["to_q", "to_k"]

parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--huber", action="store_true")
ema = EMAModuleWrapper(parameters, decay=0.9, update_step_interval=8)
class Adapter:
    def targets(self):
        """Layers."""
        return ["w1"]
'''
COMMAND = """
eta=0.7
SPLITS="0,3,6,9"
BATCH=${BATCH:-64}
# --lr 1e-3
accelerate launch --num_processes=2 train.py \\
    --lr 1e-5 \\
    --discount 0.1 0.25 \\
    --eta $eta --splits "${SPLITS}" \\
    data.batch=$BATCH \\
    'data.range=[0, 5]' \\
    data.targets="['to_q','to_k']" \\
    --use_huber \\
    --last 5.0 \\
"""


@pytest.mark.parametrize(
    ("path", "text", "key", "value"),
    [
        ("a.yaml", YAML, "train.learning_rate", 3e-4),
        ("a.yaml", YAML, "train.small", 1e-5),
        ("a.yaml", YAML, "train.steps", [1, 2, 3]),
        ("a.yaml", YAML, "train.absent", MISSING),
        ("a.yaml", YAML, "train.small.deeper", MISSING),
        ("a.toml", TOML, "model.rl.beta", 0.01),
        ("a.toml", TOML, "model.parts.1.rate", 0.2),
        ("a.toml", TOML, "model.parts.2.rate", MISSING),
        ("a.py", PYTHON, "base: train.lr", 3e-4),
        ("a.py", PYTHON, "base: sizes", 48),
        ("a.py", PYTHON, "other: config.flag", True),
        # Arithmetic is not computed: its source is the value.
        ("a.py", PYTHON, "other: config.train.beta", "0.01 * 2"),
        ("a.py", PYTHON, "other: config.guidance", 1.0),
        ("a.py", PYTHON, "base: config.train.beta", MISSING),
        ("a.py", PYTHON, "nowhere: config.train.beta", MISSING),
        ("a.py", PYTHON, "--lr", 1e-4),
        ("a.py", PYTHON, "--huber", False),
        ("a.py", PYTHON, "--absent", MISSING),
        ("a.py", PYTHON, "EMAModuleWrapper(decay)", 0.9),
        ("a.py", PYTHON, "EMAModuleWrapper(absent)", MISSING),
        ("a.py", PYTHON, "targets()", ["w1"]),
        ("a.sh", COMMAND, "--lr", 1e-5),
        ("a.md", COMMAND, "--lr", 1e-5),
        ("a.sh", COMMAND, "--discount", [0.1, 0.25]),
        ("a.sh", COMMAND, "--eta", 0.7),
        ("a.sh", COMMAND, "--splits", (0, 3, 6, 9)),
        ("a.sh", COMMAND, "SPLITS", (0, 3, 6, 9)),
        ("a.sh", COMMAND, "data.batch", 64),
        ("a.sh", COMMAND, "data.range", [0, 5]),
        ("a.sh", COMMAND, "data.targets", ["to_q", "to_k"]),
        ("a.sh", COMMAND, "--use_huber", True),
        ("a.sh", COMMAND, "--last", 5.0),
        ("a.sh", COMMAND, "--absent", MISSING),
    ],
)
def test_a_value_is_read_by_the_kind_of_its_file(path, text, key, value):
    found = extract_value(text, path, key)
    assert found is MISSING if value is MISSING else found == value
    assert type(found) is type(value)


def test_other_files_are_refused():
    with pytest.raises(ValueError, match=r"a\.ini: values are read from \.yaml, \.toml, \.py"):
        extract_value("", "a.ini", "key")


def test_a_value_is_stated_as_a_recipe_states_it():
    assert convert("0-0.25-0.005-0.999", {"pattern": "-([^-]+)$"}) == 0.999
    assert convert([1, 2, 3], {"item": -1, "times": 0.1, "plus": 0.1}) == pytest.approx(0.4)
    assert convert(True, {"means": {True: "global", False: "group"}}) == "global"
    assert convert([0, 5], {"means": {"[0, 5]": 0.3}}) == 0.3
    with pytest.raises(ValueError, match="'SA' is none of"):
        convert("SA", {"means": {"ODE": "ode"}})
    with pytest.raises(ValueError, match="does not match"):
        convert("none", {"pattern": "([0-9]+)"})


def test_values_are_equal_apart_from_rounding_and_not_from_their_type():
    assert is_equal(1, 1.0)
    assert is_equal([0.1 + 0.2, 1], (0.3, 1))
    assert not is_equal(True, 1)
    assert not is_equal(1e-4, 1e-5)
    assert not is_equal([1], [1, 2])


def test_every_published_value_has_an_entry():
    data = read_data()
    assert find_gaps(data) == []
    assert sum(len(table.published) for table in list_published_defaults().values()) == sum(
        len(list_entries(group)) for group in data["algorithms"].values()
    )


def test_a_value_without_an_entry_is_a_gap(monkeypatch):
    data = read_data()
    settings = {**ALGORITHMS["awm"].published, "sampler.eta": PublishedSetting(0.4, "a/b c.py")}
    monkeypatch.setattr(ALGORITHMS["awm"], "published", settings)
    del data["recipes"]["sana_nft"]
    data["recipes"]["flux2_dev"]["without"] = ["policy.rank"]
    data["recipes"]["flux2_edit"]["overrides"] = {"stages.0.window.kind": {"text": "random"}}
    assert find_gaps(data) == [
        "algorithm awm: sampler.eta",
        "recipe flux2_dev: policy.rank",
        "recipe flux2_edit: stages.0.window.kind: is",
        "recipe sana_nft",
    ]


def test_a_recipe_has_the_entries_of_the_one_it_is_like():
    entries = list_recipe_entries(read_data(), "sd35_medium_specialists")
    assert entries["stages.2.sampler.eta"] == entries["stages.3.sampler.eta"]
    assert entries["stages.2.sampler.eta"]["at"] == "flow_grpo_base"
    assert "policy.ema.max_decay" not in entries
    values = list_recipe_values("sd35_medium_specialists")
    assert values["stages.1.algorithm.beta"] == 100
    assert not any(key.startswith("rewards") for key in values)


@pytest.fixture
def clones(tmp_path):
    """A folder with a clone of one commit of a repository ``somebody/code``."""
    folder = tmp_path / "somebody+code"
    folder.mkdir()
    (folder / "a.yaml").write_text("beta: 1.0\nsteps: 10\nstd: true\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-C", str(folder)]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return Clones(tmp_path), commit.stdout.strip()


def compare_one(clones, entry, row, monkeypatch, repository="somebody/code", path="a.yaml"):
    folder, commit = clones
    monkeypatch.setattr(ALGORITHMS["crd"], "published", {"algorithm.beta": row})
    data = {
        "files": {"a": {"repository": repository, "commit": commit, "path": path}},
        "algorithms": {"crd": {"at": "a", "values": {"algorithm.beta": entry}}},
        "recipes": {},
        "targets": {},
    }
    (rows, _, _) = Comparison(data, folder).compare_all().values()
    return rows[0]


@pytest.mark.parametrize(
    ("entry", "row", "state", "remark"),
    [
        ("beta", PublishedSetting(1.0, "a"), EQUAL, ""),
        ("steps", PublishedSetting(10, "a", deviation="it is long"), DIFFERS, "it is long"),
        ("steps", PublishedSetting(10, "a"), WRONG, "differs without a reason"),
        ("beta", PublishedSetting(1.0, "a", deviation="why"), WRONG, "is equal, and has a reason"),
        ("steps", PublishedSetting(9, "a", deviation="why"), WRONG, "9 is said to be published"),
        ("absent", PublishedSetting(1.0, "a"), WRONG, "the file has no absent"),
        ({"text": "beta: 1.0"}, PublishedSetting(1.0, "a"), EQUAL, ""),
        ({"text": "beta: 1.0"}, PublishedSetting(2.0, "a"), WRONG, "differs without a reason"),
        ({"text": "beta: 2.0"}, PublishedSetting(1.0, "a"), WRONG, "the file has 'beta: 2.0'"),
        ({"absent": "kl"}, PublishedSetting(1.0, "a"), EQUAL, ""),
        ({"absent": "beta"}, PublishedSetting(1.0, "a"), WRONG, "the file has 'beta'"),
        ({"key": "std", "means": {False: 1}}, PublishedSetting(1.0, "a"), WRONG, "is none of"),
    ],
)
def test_a_value_is_equal_differs_with_a_reason_or_is_wrong(
    clones, entry, row, state, remark, monkeypatch
):
    compared = compare_one(clones, entry, row, monkeypatch)
    assert compared.state == state
    assert remark in compared.remark


@pytest.mark.parametrize(("stated", "state"), [(8, EQUAL), (16, WRONG)])
def test_words_show_a_value_that_a_recipe_must_have(clones, stated, state, monkeypatch):
    folder, commit = clones
    monkeypatch.setattr(published, "list_recipe_values", lambda name: {"policy.rank": 8})
    entry = {"text": "beta: 1.0", "is": stated}
    data = {
        "files": {"a": {"repository": "somebody/code", "commit": commit, "path": "a.yaml"}},
        "algorithms": {},
        "recipes": {"mine": {"at": "a", "values": {"policy.rank": entry}}},
        "targets": {},
    }
    (_, [row], _) = Comparison(data, folder).compare_all().values()
    assert (row.state, row.ours, row.published) == (state, 8, stated)


def test_a_folder_without_any_clone_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(published, "REPORT", tmp_path / "report.md")
    data = {
        "files": {"a": {"repository": "somebody/code", "commit": "1", "path": "a.yaml"}},
        "algorithms": {"crd": {"at": "a", "values": {"algorithm.beta": "beta"}}},
        "recipes": {},
        "targets": {},
    }
    monkeypatch.setattr(published, "read_data", lambda: data)
    monkeypatch.setattr(published, "find_gaps", lambda data: [])
    monkeypatch.setattr("sys.argv", ["published", "--sources", str(tmp_path)])
    assert published.main() == 1
    assert f"{tmp_path} has no clone of any source" in capsys.readouterr().err
    assert not published.REPORT.exists()


def test_a_source_that_is_not_there_is_not_found(clones, monkeypatch):
    row = PublishedSetting(1.0, "a")
    for where in ({"repository": "nobody/code"}, {"path": "b.yaml"}):
        assert compare_one(clones, "beta", row, monkeypatch, **where).state == NOT_FOUND


def test_the_report_counts_the_states_and_links_to_the_sources(clones, monkeypatch):
    row = compare_one(clones, "beta", PublishedSetting(1.0, "a"), monkeypatch)
    report = format_report({"Defaults": [row], "Recipes": [row._replace(state=WRONG)]})
    assert "| unexplained | 0 | 1 | 1 |" in report
    assert f"https://github.com/somebody/code/blob/{clones[1]}/a.yaml" in report
    assert count_states([row])[EQUAL] == 1


def test_the_committed_report_is_of_the_data_and_has_no_unexplained_difference():
    report = published.REPORT.read_text()
    data = read_data()
    entries = [
        *(
            (name, setting)
            for name, group in data["algorithms"].items()
            for setting in list_entries(group)
        ),
        *(
            (name, setting)
            for name in data["recipes"]
            for setting in list_recipe_entries(data, name)
        ),
        *((family, "targets") for family in data["targets"]),
    ]
    rows = [line.split(" | ") for line in report.splitlines() if line.startswith("| ")]
    written = [(row[0].removeprefix("| "), row[1].strip("`")) for row in rows if len(row) == 8]
    assert written == entries
    # What a recipe says today, so that a value that was changed since is compared again.
    stated = [
        (name, setting, published._format_value(values[setting]))
        for name in data["recipes"]
        for values in [list_recipe_values(name)]
        for setting in list_recipe_entries(data, name)
    ]
    here = [(row[0].removeprefix("| "), row[1].strip("`"), row[2]) for row in rows if len(row) == 8]
    assert [row for row in here if row[0] in data["recipes"] and row[1] != "targets"] == stated
    assert "| unexplained | 0 | 0 | 0 | 0 |" in report
