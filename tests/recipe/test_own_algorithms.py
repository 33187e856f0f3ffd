"""A user's own algorithm: as good as a built-in one, and what is none is explained."""

from __future__ import annotations

import pytest
from stage_cases import offline, online, problem, resolved

from ebbflow.algorithms.base import Algorithm, select_groups
from ebbflow.recipe.algorithms import ForwardConfig, TrajectoryConfig
from ebbflow.recipe.choices import SamplerConfig, WindowConfig
from ebbflow.recipe.plugins import import_object


class OwnForward(ForwardConfig):
    """Mine."""

    stage_defaults = {"reference": {"weight": 0.3}, "sampler": {"steps": 8}}
    strength: float = 1.0


class OwnTrajectory(TrajectoryConfig):
    """Mine, on trajectories."""

    stage_defaults = {"sampler": {"name": "cps"}, "window": {"kind": "random"}}


class Everywhere(OwnTrajectory):
    """Mine, on trajectories that offline stages do not store."""

    stages = ("online", "offline")


class OfDensities(OwnTrajectory):
    """Mine, on log-probs that must be densities."""

    needs_density = True


class Taught(OwnTrajectory):
    """Mine, with a teacher."""

    teacher: str


class TaughtForward(OwnForward):
    """Mine, with a teacher, on final latents."""

    teacher: str = "s3://bucket/teacher"


class Reshaping(OwnForward):
    """Mine, on final latents, with advantages of its own."""

    reshapes_advantages = True


class Defaults(TrajectoryConfig):
    """Mine, with keys of a window and a sampler without their kind and name."""

    stage_defaults = {"sampler": {"name": "flow_sde", "steps": 9}, "window": {"size": 2}}


FORWARD_ONE = Algorithm(OwnForward, lambda rows, config: (None, {}), select=select_groups)
TRAJECTORY_ONE = Algorithm(OwnTrajectory, lambda rows, config: (None, {}))
EVERYWHERE = Algorithm(Everywhere, lambda rows, config: (None, {}))
OF_DENSITIES = Algorithm(OfDensities, lambda rows, config: (None, {}))
TAUGHT = Algorithm(
    Taught, lambda rows, config: (None, {}), copies=lambda config: frozenset({"teacher"})
)
TAUGHT_FORWARD = Algorithm(
    TaughtForward, lambda rows, config: (None, {}), copies=lambda config: frozenset({"teacher"})
)
UNTAUGHT = Algorithm(
    OwnTrajectory, lambda rows, config: (None, {}), copies=lambda config: frozenset({"teacher"})
)
RESHAPES = Algorithm(Reshaping, lambda rows, config: (None, {}), reshape=lambda *given: given[0])
RESHAPES_UNSAID = Algorithm(
    OwnTrajectory, lambda rows, config: (None, {}), reshape=lambda *given: given[0]
)
RESHAPES_NOT = Algorithm(Reshaping, lambda rows, config: (None, {}))
DEFAULTS = Algorithm(Defaults, lambda rows, config: (None, {}))
HERE = __name__


def own(name, **rest):
    return {"name": "custom", "path": f"{HERE}:{name}", **rest}


def test_a_users_own_algorithm_is_as_good_as_a_built_in_one():
    stage = resolved(
        {
            "kind": "offline",
            "algorithm": own("FORWARD_ONE", options={"strength": 2.0, "noise_levels": 3}),
        }
    )
    assert stage.hyper_parameters == OwnForward(strength=2.0, noise_levels=3)
    assert (stage.reference.weight, stage.reference.penalty, stage.sampler.steps) == (
        0.3,
        "velocity",
        8,
    )
    assert stage.algorithm_name == f"{HERE}:FORWARD_ONE"
    on_trajectories = resolved(
        {"kind": "online", "algorithm": own("TRAJECTORY_ONE"), "window": {"size": 2}}
    )
    assert on_trajectories.sampler.name == "cps"
    assert on_trajectories.window == WindowConfig(kind="random", size=2)
    assert on_trajectories.reference.penalty == "kl"
    for found in (stage, on_trajectories):
        assert resolved(found.model_dump(mode="json")) == found


def test_its_defaults_are_for_its_own_sampler_and_kind_of_window():
    plain, other = (
        resolved(online(algorithm=own("DEFAULTS"), **keys))
        for keys in ({}, {"sampler": {"name": "dance_sde"}, "window": {"kind": "share"}})
    )
    assert (plain.sampler, plain.window) == (
        SamplerConfig(name="flow_sde", steps=9),
        WindowConfig(kind="progressive", size=2),
    )
    assert (other.sampler, other.window) == (
        SamplerConfig(name="dance_sde", steps=9),
        WindowConfig(kind="share"),
    )


def test_a_sampler_without_densities_is_refused_to_those_that_need_them():
    assert (
        resolved(online(algorithm=own("OF_DENSITIES"), sampler={"name": "flow_sde"})).sampler.name
        == "flow_sde"
    )
    assert f"{HERE}:OF_DENSITIES needs log-probs that are densities" in problem(
        online(algorithm=own("OF_DENSITIES"))
    )


def test_a_teacher_needs_a_key_that_says_where_it_is():
    stage = resolved(online(algorithm=own("TAUGHT", options={"teacher": "s3://bucket/teacher"})))
    assert stage.hyper_parameters == Taught(teacher="s3://bucket/teacher")
    text = problem(online(algorithm=own("UNTAUGHT")))
    assert f"{HERE}:UNTAUGHT asks for the copy 'teacher'" in text
    assert "give OwnTrajectory a field 'teacher: str'" in text


def test_what_goes_wrong_inside_a_users_module_comes_through(tmp_path, monkeypatch):
    (tmp_path / "half_written.py").write_text("import math\n\nTURN = math.tau_of_two\n")
    monkeypatch.syspath_prepend(tmp_path)
    for imported in (
        import_object,
        lambda path: resolved(online(algorithm={"name": "custom", "path": path})),
    ):
        with pytest.raises(AttributeError, match="module 'math' has no attribute 'tau_of_two'"):
            imported("half_written:TURN")


@pytest.mark.parametrize(
    ("stage", "parts"),
    [
        (
            online(algorithm={"name": "custom", "path": "no_such_package.mine:ALGORITHM"}),
            ("no_such_package.mine:ALGORITHM cannot be imported", "PYTHONPATH"),
        ),
        (
            online(algorithm=own("FORWARD_TWO")),
            (f"the module '{HERE}' has no 'FORWARD_TWO'; did you mean 'FORWARD_ONE'?",),
        ),
        (online(algorithm=own("zzzz")), ("has no 'zzzz'; name something that it defines",)),
        (
            online(algorithm={**own("FORWARD_ONE"), "optons": {}}),
            (
                (
                    "algorithm.custom.optons: unknown key; did you mean 'options'? Known keys here:"
                    " name, options, path"
                ),
            ),
        ),
        (
            online(algorithm=own("EVERYWHERE")),
            ("EVERYWHERE: offline stages store no trajectories", "Everywhere.stages"),
        ),
        (
            online(algorithm=own("RESHAPES_UNSAID")),
            ("RESHAPES_UNSAID has 'reshape'", "'reshapes_advantages: ClassVar = True'"),
        ),
        (
            online(algorithm=own("RESHAPES_NOT")),
            ("RESHAPES_NOT has no 'reshape'", "'reshapes_advantages: ClassVar = False'"),
        ),
        (
            offline(algorithm=own("RESHAPES")),
            ("RESHAPES has 'reshape'", "take 'offline' out of Reshaping.stages"),
        ),
        (
            online(algorithm=own("HERE")),
            ("HERE is a str, not an ebbflow.algorithms.base.Algorithm",),
        ),
        (
            online(algorithm=own("OwnForward")),
            ("OwnForward is a", "not an ebbflow.algorithms.base.Algorithm"),
        ),
        (
            online(algorithm=own("FORWARD_ONE", options={"strenth": 2})),
            ("options of", "strenth: unknown key; did you mean 'strength'?"),
        ),
        (
            online(algorithm=own("FORWARD_ONE", options={"strength": "much"})),
            ("options of", "strength = 'much'"),
        ),
        (
            online(algorithm={"name": "custom", "path": "no colon"}),
            ("path = 'no colon'", "give package.module:name of your own"),
        ),
        (online(algorithm={"name": "custom"}), ("path", "Field required")),
        (
            offline(algorithm=own("TRAJECTORY_ONE")),
            ("TRAJECTORY_ONE needs fresh trajectories", "diffusion_nft"),
        ),
        (
            offline(algorithm=own("TAUGHT_FORWARD")),
            ("TAUGHT_FORWARD learns from a teacher", "only online stages"),
        ),
        (
            online(algorithm=own("FORWARD_ONE"), window={}),
            ("FORWARD_ONE trains on final latents alone", "leave 'window' out"),
        ),
        (
            online(algorithm=own("TRAJECTORY_ONE"), sampler={"name": "ode"}),
            ("TRAJECTORY_ONE needs the log-probabilities",),
        ),
    ],
)
def test_what_is_no_algorithm_of_ones_own_is_explained(stage, parts):
    text = problem(stage)
    for part in parts:
        assert part in text
