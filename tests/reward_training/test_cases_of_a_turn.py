"""Bad cases, and which pairs are labelled next."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
from reward_label_cases import build_recipe, encode, make_answers, write_rows

from ebbflow.data.labels import read_labels
from ebbflow.data.prompt_files import read_prompt_file
from ebbflow.data.prompts import Prompt
from ebbflow.data.sampling import sample_prompts
from ebbflow.recipe import Recipe
from ebbflow.reward_training import turn
from ebbflow.reward_training.bad_cases import (
    BadCase,
    find_disagreements,
    find_regressions,
    find_rejected_prompts,
    write_bad_cases,
)
from ebbflow.reward_training.folder import RewardModelRecord
from ebbflow.reward_training.queue import choose_prompts
from ebbflow.reward_training.select_pairs import select_pairs
from ebbflow.rewards.reward_networks import RewardNetwork
from ebbflow.stage import StageContext


class Darkness(RewardNetwork):
    def forward(self, images, prompts):
        return 1 - images.mean((1, 2, 3))


def evaluation(rewards, split="validation"):
    return pa.table(
        {
            "prompt": [f"p{index}" for index in range(len(rewards))],
            "split": [split for _ in rewards],
            "reward": pa.array(rewards, pa.float64()),
            "failure": ["broken" if reward is None else None for reward in rewards],
        }
    )


def test_disagreements_are_the_answers_that_the_model_contradicts(tmp_path):
    dark, light = (encode(np.full((16, 32, 3), level, np.uint8)) for level in (10, 200))
    grey = encode(np.full((16, 32, 3), 100, np.uint8))
    rows = [
        {"prompt": "right", "chosen": dark, "rejected": light},
        {"prompt": "wrong", "chosen": light, "rejected": dark},
        {"prompt": "slightly wrong", "chosen": grey, "rejected": dark},
    ]
    labels = read_labels([write_rows(tmp_path / "pairs.parquet", rows)])
    cases = find_disagreements(Darkness(), labels, 5)
    assert [case.prompt for case in cases] == ["wrong", "slightly wrong"]
    assert abs(cases[0].size - 190 / 255) < 1e-6


def test_regressions_are_of_validation_prompts_alone():
    before = evaluation([0.5, 0.9, 0.4, 0.8])
    after = evaluation([0.6, 0.2, 0.3, None])
    assert [case.prompt for case in find_regressions(after, before, 5)] == ["p1", "p2"]
    assert [case.prompt for case in find_regressions(after, before, 1)] == ["p1"]
    assert [case.prompt for case in find_rejected_prompts(after, 5)] == ["p3"]
    held_out = evaluation([0.1, 0.1, 0.1, None], "held_out")
    assert find_regressions(held_out, evaluation([1.0] * 4, "held_out"), 5) == []
    assert find_rejected_prompts(held_out, 5) == []


def test_bad_cases_are_a_prompt_file_with_each_prompt_once(tmp_path):
    before = pa.table(
        {"prompt": ['"AB"'], "split": ["validation"], "reward": [0.9], "failure": [None]}
    )
    after = before.set_column(2, "reward", pa.array([0.1]))
    cases = find_regressions(after, before, 5)
    write_bad_cases(tmp_path / "prompts.jsonl", [*cases, *cases])
    (line,) = (tmp_path / "prompts.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"] == "the reward fell"
    (row,), _ = read_prompt_file(tmp_path / "prompts.jsonl")
    assert (row.prompt, row.target) == ('"AB"', "AB")


def test_the_most_uncertain_pairs_come_first_and_no_picture_twice():
    prompt_ids = [0, 0, 0, 1, 1, 2, 2]
    scores = [0.0, 5.0, 5.1, 1.0, 1.01, 3.0, 9.0]
    pairs = select_pairs(prompt_ids, scores, 4, seed=0)
    # Half of the four: the gaps .01 and .1. The rest is random: one more pair is left.
    assert pairs == [(3, 4), (1, 2), (5, 6)]
    assert select_pairs(prompt_ids, scores, 1, seed=0) in ([pair] for pair in pairs)
    drawn = {tuple(select_pairs(prompt_ids, None, 2, seed)) for seed in range(20)}
    assert len(drawn) > 3


def test_prompts_of_bad_cases_are_chosen_first():
    prompts = [Prompt(index, f"p{index}", "", None, "x", "train", "{}") for index in range(30)]
    chosen = [prompt.prompt for prompt in choose_prompts(prompts, ["p7", "p3", "gone"], 5, 0)]
    assert chosen[:2] == ["p7", "p3"]
    assert len(set(chosen)) == 5
    assert chosen != [prompt.prompt for prompt in choose_prompts(prompts, ["p7", "p3"], 5, 1)]


def test_a_turn_with_more_labels_asks_about_other_prompts(tmp_path, monkeypatch):
    prompts = [Prompt(index, f"p{index}", "", None, "x", "train", "{}") for index in range(100)]
    asked: list[set[str]] = []

    def write_asked_prompts(recipe, model, policy, chosen, reward, count, seed, path):
        asked.append({prompt.prompt for prompt in chosen})
        path.write_bytes(b"")
        return len(chosen)

    monkeypatch.setattr(turn, "set_up_process", lambda recipe: None)
    monkeypatch.setattr(turn, "open_served_policy", lambda *paths: (None, None))
    monkeypatch.setattr(turn, "read_prompts", lambda path: prompts)
    monkeypatch.setattr(turn, "read_table", lambda path: evaluation([0.5]))
    monkeypatch.setattr(turn, "generate_queue", write_asked_prompts)
    labels = write_rows(tmp_path / "1.parquet", make_answers(3))
    more_labels = write_rows(tmp_path / "2.parquet", make_answers(3, seed=1))
    recipe = build_recipe(tmp_path, labels, queue=20)
    for number, files in enumerate(([labels], [labels], [labels, more_labels])):
        paths = [str(file) for file in files]
        turn.collect_next_turn(recipe, *[tmp_path] * 5, paths, tmp_path / f"turn-{number}")
    first, again, second = asked
    assert first == again
    assert len(second - first) > 10


def describe_reward_model(labels: str, compared_with: str | None) -> RewardModelRecord:
    return RewardModelRecord.model_construct(labels_digest=labels, compared_with=compared_with)


def test_each_turn_with_new_labels_trains_on_other_prompts_and_noise():
    recipe = Recipe(seed=3)
    seeds = [
        turn.choose_turn_seed(recipe, describe_reward_model(labels, compared_with))
        for labels, compared_with in (("a", None), ("b", "1"), ("b", "1"), ("c", "1"))
    ]
    # `ebbflow label` has trained the stages on data of the first turn with the recipe's own.
    assert seeds[0] == 3
    # A killed turn is started again with the same labels.
    assert seeds[1] == seeds[2]
    assert len(set(seeds)) == 3
    # As the prompts and the noise of an online stage are chosen.
    stages = [StageContext(Recipe(seed=seed), 0, 0).stage_seed for seed in (seeds[0], *seeds[2:])]
    prompts = [tuple(sample_prompts(range(1000), 32, 0, seed)) for seed in stages]
    assert len(set(stages)) == 3
    assert len(set(prompts[0]) & set(prompts[1])) < 10
    assert len(set(prompts[1]) & set(prompts[2])) < 10


def test_random_strings_of_earlier_turns_are_asked_about_again():
    splits = ["train", "validation", "held_out", "train"]
    table = [
        Prompt(index, f'"P{index}"', "", f"P{index}", "glyph", split, "{}")
        for index, split in enumerate(splits)
    ]
    cases = [BadCase(text, "x", 1.0) for text in ('"OLD"', '"P2"', '"P0"', '"OLD"', '"P1"')]
    strings = turn.list_askable_prompts(Recipe(), table, cases)
    assert [prompt.prompt for prompt in strings] == ['"P0"', '"P3"', '"OLD"']
    # Held out and validated are not among them, and ids, which fix the noise, are of one prompt.
    assert (strings[-1].target, strings[-1].prompt_id) == ("OLD", 4)
    chosen = choose_prompts(strings, [case.prompt for case in cases], 2, 0)
    assert {prompt.prompt for prompt in chosen} == {'"OLD"', '"P0"'}
    # Prompts of a file are the same in every turn: what is not among them is no prompt of the run.
    from_file = Recipe.model_validate({"prompts": {"source": "prompts.txt"}})
    assert turn.list_askable_prompts(from_file, table, cases) == [table[0], table[3]]
