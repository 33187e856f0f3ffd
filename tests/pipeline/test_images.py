"""The images of the pods: what is in them, how they are pinned, and who builds them."""

from __future__ import annotations

import argparse
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.core.python_auto_container import update_image_spec_copy_handling
from flytekit.image_spec.default_builder import create_docker_context
from packaging.requirements import Requirement

from tasks.images import build_cpu_image
from tests.pipeline.conftest import ROOT

DOCKERFILES = sorted((ROOT / "containers").glob("*.Dockerfile"))


def _instructions(file: Path) -> list[tuple[str, str]]:
    """(instruction, the rest of it) of a Dockerfile, with its lines joined, its comments dropped
    and its arguments at their defaults.
    """
    text = "\n".join(
        line for line in file.read_text().splitlines() if line and not line.startswith("#")
    )
    for name, value in re.findall(r'^ARG (\w+)="(.*)"$', text, re.MULTILINE):
        text = text.replace(f"${name}", value)
    joined = text.replace("\\\n", " ").splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined)]


def _copied(file: Path) -> dict[str, Path]:
    """Where in the image each copied file lies, and where it comes from."""
    pairs: dict[str, Path] = {}
    for name, rest in _instructions(file):
        if name == "COPY":
            *sources, target = rest.split()
            pairs |= {
                str(Path(target, Path(source).name) if target.endswith("/") else target): Path(
                    source
                )
                for source in sources
            }
    return pairs


def _pip() -> argparse.ArgumentParser:
    """``pip install`` as the Dockerfiles may use it; any other option is an error."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("packages", nargs="*")
    parser.add_argument("--requirement", "--requirements", dest="requirements")
    for option in (
        "--constraints",
        "--build-constraints",
        "--editable",
        "--python",
        "--torch-backend",
        "--extra",
        "--config-settings",
    ):
        parser.add_argument(option)
    for flag in ("--system", "--no-cache", "--no-cache-dir", "--no-deps", "--require-hashes"):
        parser.add_argument(flag, action="store_true")
    return parser


def _installs(run: str) -> list[argparse.Namespace]:
    """The ``pip install`` commands in a RUN."""
    commands = [shlex.split(command) for command in run.split("&&")]
    tails = [command[command.index("pip") + 1 :] for command in commands if "pip" in command]
    return [_pip().parse_args(tail[1:]) for tail in tails if tail[0] == "install"]


def _pins(file: Path) -> dict[str, str]:
    """Package and version of every line, each of which must be a pin, with hashes or without."""
    text = re.sub(r" \\\n    --hash=sha256:[0-9a-f]{64}", "", file.read_text())
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9._-]+==[\w.+]+", line) for line in lines), (
        f"{file.name} has a line that is no pin"
    )
    return dict(line.split("==") for line in lines)


def _wanted(install: argparse.Namespace, copied: dict[str, Path]) -> list[str]:
    """The requirements that an install names itself or through a file."""
    if install.requirements is None:
        return install.packages
    file = ROOT / copied[install.requirements]
    if file.name == "pyproject.toml":
        assert install.extra == "all"
        project = tomllib.loads(file.read_text())["project"]
        extras = project["optional-dependencies"]
        (names,) = (Requirement(requirement).extras for requirement in extras["all"])
        listed = [requirement for name in sorted(names) for requirement in extras[name]]
        # `ebbflow[serve]` stands for an extra that is in the list itself.
        return project["dependencies"] + [one for one in listed if not one.startswith("ebbflow[")]
    return [f"{name}=={version}" for name, version in _pins(file).items()]


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("constraints.txt", ["torch"]),
        ("containers/uv.txt", []),
        ("containers/vllm-omni.txt", []),
        (
            "containers/vllm-omni-cpu.txt",
            ["torch", "torchaudio", "torchcodec", "torchvision"],
        ),
    ],
)
def test_every_package_but_torch_of_several_indexes_has_hashes(
    name: str, without: list[str]
) -> None:
    """uv compares the hashes of constraints; builds of torch for CPUs come from several indexes."""
    text = (ROOT / name).read_text()
    assert _pins(ROOT / name)
    assert re.findall(r"^([a-z0-9._-]+)==[\w.+]+$", text, re.MULTILINE) == without


def test_actions_of_ci_are_commits() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    actions = re.findall(r"uses: (\S+)(.*)", text)
    assert actions
    for action, comment in actions:
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r"  # v\d+\.\d+\.\d+", comment), action


def test_there_are_the_four_images() -> None:
    assert [file.stem for file in DOCKERFILES] == ["base", "reward", "rollout", "trainer"]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_what_a_dockerfile_copies_exists(file: Path) -> None:
    sources = _copied(file).values()
    assert {"datasets", "ebbflow", "tasks", "workflows", "pyproject.toml"} <= {
        str(source) for source in sources
    }
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_the_images_stand_on_one_digest() -> None:
    stands_on = {
        rest for file in DOCKERFILES for name, rest in _instructions(file) if name == "FROM"
    }
    assert stands_on == {build_cpu_image("localhost:1").base_image}
    assert re.fullmatch(r"python:3\.11\.\d+-slim-[a-z]+@sha256:[0-9a-f]{64}", stands_on.pop())


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_everything_that_is_installed_is_pinned(file: Path) -> None:
    copied = _copied(file)
    installs = [
        install
        for name, rest in _instructions(file)
        if name == "RUN"
        for install in _installs(rest)
    ]
    assert len(installs) >= 3
    for install in installs:
        pins = _pins(ROOT / copied[install.constraints]) if install.constraints else {}
        for requirement in map(Requirement, _wanted(install, copied)):
            assert str(requirement.specifier).startswith("==") or requirement.name in pins, (
                requirement
            )
        # A file of pins is all that is installed, so pip and uv can refuse a file without a hash.
        is_list_of_pins = install.requirements not in (None, "pyproject.toml")
        assert install.require_hashes == is_list_of_pins
        if install.editable:
            assert install.no_deps
            assert "setuptools" in _pins(ROOT / copied[install.build_constraints])


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_an_image_has_the_bytecode_of_packages_and_of_our_own_code(file: Path) -> None:
    instructions = _instructions(file)
    variables = [rest for name, rest in instructions if name == "ENV"]
    assert "PYTHONDONTWRITEBYTECODE=1" in " ".join(variables)
    installs = [index for index, (_, rest) in enumerate(instructions) if "uv pip install" in rest]
    assert ("ENV", "UV_COMPILE_BYTECODE=1") in instructions[: installs[0]]
    # An editable installation compiles nothing: each pod would.
    compiled = ("RUN", "python3 -m compileall -q ebbflow tasks workflows")
    before = instructions[: instructions.index(compiled)]
    assert {("COPY", f"{name} {name}") for name in ("ebbflow", "tasks", "workflows")} <= set(before)


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_an_image_runs_as_any_user_and_writes_into_tmp_alone(file: Path) -> None:
    instructions = _instructions(file)
    (user,) = (rest for name, rest in instructions if name == "USER")
    assert user == "1000"
    assert ("WORKDIR", "/opt/ebbflow") in instructions
    assert "/root" not in file.read_text()
    (variables,) = (rest.split() for name, rest in instructions if name == "ENV" and "HOME" in rest)
    assert {"HOME=/tmp", "USER=ebbflow"} <= set(variables), "MLflow and torch ask for a user's name"


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_uploaded_sources_come_before_those_of_an_image(file: Path) -> None:
    """They come by PYTHONPATH, which pods set, and that comes before an editable installation."""
    variables = " ".join(rest for name, rest in _instructions(file) if name == "ENV")
    assert "PYTHONPATH" not in variables
    installs = [
        install
        for name, rest in _instructions(file)
        if name == "RUN"
        for install in _installs(rest)
    ]
    # Of the pods' own Python: with it, modules of the user's are found beside Ebbflow.
    (install,) = (one for one in installs if one.editable == "." and not one.python)
    assert install.config_settings == "editable_mode=compat"


@pytest.mark.parametrize("image", ["base", "reward", "rollout"])
def test_the_images_of_ray_pods_have_what_its_operator_probes_them_with(image: str) -> None:
    (install,) = (
        rest
        for name, rest in _instructions(ROOT / "containers" / f"{image}.Dockerfile")
        if name == "RUN" and "apt-get" in rest
    )
    assert " wget " in install


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_the_first_process_of_an_image_ends_at_sigterm_from_its_start(file: Path) -> None:
    target = "/usr/local/lib/python3.11/site-packages/first_process.pth"
    assert _copied(file)[target] == Path("containers/environment/first_process.pth")


def test_the_builder_gets_what_the_dockerfiles_copy_and_nothing_else() -> None:
    sent = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert sent == {source.parts[0] for file in DOCKERFILES for source in _copied(file).values()}


def test_the_engine_is_the_one_that_goes_with_its_vllm() -> None:
    pins = _pins(ROOT / "containers" / "vllm-omni.txt")
    assert pins["vllm"] == pins["vllm-omni"]


def test_flyte_builds_the_cpu_image_from_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    create_docker_context(build_cpu_image("localhost:30000"), tmp_path)
    written = (tmp_path / "Dockerfile").read_text()
    base = "\n".join(
        " ".join(instruction)
        for instruction in _instructions(ROOT / "containers" / "base.Dockerfile")
    )
    copied = _copied(ROOT / "containers" / "base.Dockerfile")
    # What installs uv is in the requirements.
    sources = [source for source in copied.values() if source.name != "uv.txt"]
    assert all((tmp_path / source).exists() for source in sources)
    assert (tmp_path / "ebbflow" / "datasets" / "signs" / "prompts.txt").is_file()
    requirements = (tmp_path / "requirements_uv.txt").read_text().split()
    assert set((ROOT / "containers" / "uv.txt").read_text().split()) <= set(requirements)
    assert all(
        " --torch-backend cpu --constraints constraints.txt " in text for text in (written, base)
    )
    assert "first_process.pth /usr/local/lib/python3.11/site-packages" in written
    assert all(
        "tesseract-ocr" in text and "wget" in text and "MLFLOW_DISABLE_TELEMETRY=true" in text
        for text in (written, base)
    )


def test_a_pod_knows_the_cpu_image_that_was_built_when_registering() -> None:
    registered = build_cpu_image("localhost:30000")
    settings = SerializationSettings(
        ImageConfig.auto(img_name="ebbflow:test"), source_root="/somewhere/else"
    )
    update_image_spec_copy_handling(registered, settings)
    assert (
        registered.id
        == build_cpu_image("localhost:30000").id
        != build_cpu_image("localhost:30001").id
    )
