"""Programs that answer as raters: what they prefer, how often they err, and where a stopped one
goes on. And queues of pairs.
"""

from __future__ import annotations

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from label_cases import grey, level, make_comparison, opened

from ebbflow.cli import main
from ebbflow.data.labels import read_labels
from ebbflow.labeling.results import write_results
from ebbflow.labeling.sources import LabelError, load_label_task, load_queue, write_queue
from ebbflow.labeling.stand_in import answer_as_stand_in
from ebbflow.rewards.base import Reward, RewardResult


class Brightness(Reward):
    name = "brightness"

    def __call__(self, images, prompts):
        return RewardResult(images.mean((1, 2, 3)) / 255)


def write_pairs_of_greys(path, pairs):
    write_queue(path, [(f"p{row}", grey(one), grey(two)) for row, (one, two) in enumerate(pairs)])
    return path


def test_a_stand_in_prefers_the_higher_score(tmp_path):
    queue = write_pairs_of_greys(tmp_path / "q.parquet", [(10, 200), (90, 20), (60, 61)])
    with opened(load_queue(queue, 10), tmp_path / "a") as session:
        assert answer_as_stand_in(session, Brightness(), 2, 0.0) == 6
        # Nothing is open any more.
        assert answer_as_stand_in(session, Brightness(), 2, 0.0) == 0
        write_results(session)
    labels = read_labels([tmp_path / "a"])
    assert {one.rater for one in labels.judgements} == {"stand-in 1", "stand-in 2"}
    for one in labels.judgements:
        brighter = level(labels.pictures[one.first]) > level(labels.pictures[one.second])
        assert one.preference == float(brighter)


def test_a_stand_in_errs_at_the_stated_rate_and_answers_again_alike(tmp_path):
    queue = write_pairs_of_greys(tmp_path / "q.parquet", [(10, 100 + row) for row in range(150)])
    answers = []
    for folder in ("a", "b"):
        with opened(load_queue(queue, 150), tmp_path / folder) as session:
            answer_as_stand_in(session, Brightness(), 2, 0.1)
            write_results(session)
        answers.append([one.preference for one in read_labels([tmp_path / folder]).judgements])
    assert answers[0] == answers[1]
    # 300 answers, of which 30 are wrong on average, with a deviation of 5.2.
    assert 10 <= np.sum(np.array(answers[0]) == 1) <= 50


def test_pairs_of_a_queue_come_in_its_order_and_only_the_first_ones(tmp_path):
    queue = write_pairs_of_greys(tmp_path / "q.parquet", [(10, 20 + row) for row in range(6)])
    task = load_label_task([queue], None, None, 4, 0)
    with opened(task, tmp_path / "a") as session:
        assert session.order_of_pairs("ann") == ["0", "1", "2", "3"]
    with opened(make_comparison(tmp_path, [True] * 9), tmp_path / "b") as session:
        assert session.order_of_pairs("ann") != list(session.pairs)


def test_a_picture_without_a_score_is_an_error_that_names_the_prompt(tmp_path):
    class Blind(Brightness):
        def __call__(self, images, prompts):
            return RewardResult(np.full(len(images), np.nan), failures={0: "too dark"})

    queue = write_pairs_of_greys(tmp_path / "q.parquet", [(10, 20)])
    with (
        opened(load_queue(queue, 10), tmp_path / "a") as session,
        pytest.raises(LabelError, match="p0: too dark"),
    ):
        answer_as_stand_in(session, Blind(), 1, 0.0)


def test_the_command_answers_without_a_page(tmp_path):
    queue = write_pairs_of_greys(tmp_path / "q.parquet", [(0, 200), (90, 20)])
    arguments = ["label", str(tmp_path / "a"), str(queue), "--stand-in", "jpeg_compressibility"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "2 answers of 1 stand-in(s)" in result.output
    assert (tmp_path / "a" / "labels.parquet").is_file()
    wrong = CliRunner().invoke(main, [*arguments[:-1], "no_such_reward"])
    assert wrong.exit_code == 1
    assert "no_such_reward" in wrong.output


def test_the_command_asks_about_all_pairs_of_a_recipes_queue(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    section = {"labels": ["labels"], "queue": 240}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump({"name": "fly", "reward_model": section}))
    (tmp_path / "runs" / "queues" / "fly").mkdir(parents=True)
    write_pairs_of_greys(
        tmp_path / "runs" / "queues" / "fly" / "queue.parquet",
        [(row, 250) for row in range(240)],
    )
    arguments = ["label", "labels/1", "r.yaml", "--stand-in", "jpeg_compressibility"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "240 answers" in result.output


def test_a_queue_that_cannot_be_generated_is_an_error_without_a_traceback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = {
        "name": "fly",
        "model": {"path": "no_model", "family": "sd3"},
        "rewards": ["jpeg_compressibility"],
        "guardrails": [],
        "prompts": {"source": "prompts.txt", "validation": 1, "held_out": 2},
        "reward_model": {"labels": ["labels"]},
    }
    (tmp_path / "prompts.txt").write_text("".join(f"prompt {row}\n" for row in range(100)))
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    result = CliRunner().invoke(main, ["label", "labels/1", "r.yaml"])
    assert isinstance(result.exception, SystemExit)
    assert "no_model" in result.output
