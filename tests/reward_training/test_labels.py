"""Labels in the layouts of Pick-a-Pic, HPD, pairs and ratings, and those of ``ebbflow label``."""

from __future__ import annotations

import json

import pytest
from reward_label_cases import draw_text, encode, make_answers, write_rows

from ebbflow.data.labels import LabelFileError, Rating, group_judgements, read_labels

GOOD = encode(draw_text("GOOD"))
BAD = encode(draw_text("BAAD"))
WORST = encode(draw_text("XXXX"))


def test_an_answer_of_pick_a_pic_is_a_judgement_of_its_rater(tmp_path):
    rows = [
        {"caption": '"GOOD"', "jpg_0": GOOD, "jpg_1": BAD, "label_0": first, "label_1": 1 - first}
        | {"user_id": rater, "has_label": True}
        for rater, first in (("ann", 1.0), ("ben", 0.5))
    ]
    unanswered = rows[0] | {"has_label": False}
    labels = read_labels([write_rows(tmp_path / "a.parquet", [*rows, unanswered])])
    assert [(one.preference, one.rater) for one in labels.judgements] == [(1, "ann"), (0.5, "ben")]
    assert labels.pictures == [GOOD, BAD]  # each once
    assert labels.build_prompts([0])[0].target == "GOOD"


def test_rows_of_hpd_give_every_pair_of_their_pictures(tmp_path):
    for name, content in (("g.png", GOOD), ("b.png", BAD), ("w.png", WORST)):
        (tmp_path / name).write_bytes(content)
    items = [
        {"prompt": "a", "file_path": ["b.png", "g.png"], "human_preference": [0, 1]},
        {"prompt": "a", "image_path": ["g.png", "b.png", "w.png"], "rank": [0, 1, 1]},
    ]
    (tmp_path / "hpd.json").write_text(json.dumps(items))
    labels = read_labels([tmp_path / "hpd.json"])
    positions = {content: index for index, content in enumerate(labels.pictures)}
    votes = group_judgements(labels)
    # The first row and the second one agree that GOOD is better, whichever side it was on.
    good, bad, worst = positions[GOOD], positions[BAD], positions[WORST]
    better = 0.0 if bad < good else 1.0
    assert votes[min(good, bad), max(good, bad)] == [better, better]
    assert votes[min(bad, worst), max(bad, worst)] == [0.5]


def test_pairs_and_ratings_are_read(tmp_path):
    pair = {"prompt": "a", "chosen": GOOD, "rejected": BAD, "kind": "blur"}
    labels = read_labels([write_rows(tmp_path / "pairs.parquet", [pair])])
    (judgement,) = labels.judgements
    assert (labels.pictures[judgement.first], judgement.preference) == (GOOD, 1)
    assert judgement.kind == "blur"
    rating = {"prompt": "a", "image": GOOD, "rating": 4, "rater": "ann"}
    labels = read_labels([write_rows(tmp_path / "ratings.parquet", [rating])])
    assert labels.ratings == [Rating(0, 4.0, "ann")]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a", "picture": "x"}, "no known layout"),
        ({"prompt": " ", "image": "x", "rating": 1}, "is no prompt"),
        ({"prompt": "a", "image": "gone.png", "rating": 1}, "no image file"),
        ({"prompt": "a", "image": "../x.png", "rating": 1}, "lies outside"),
        ({"prompt": "a", "image": "g.png", "rating": "good"}, "is no number"),
    ],
)
def test_a_row_that_is_no_label_is_named_with_its_line(tmp_path, row, problem):
    (tmp_path / "g.png").write_bytes(GOOD)
    (tmp_path / "labels.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(LabelFileError, match=f"line 1.*{problem}"):
        read_labels([tmp_path / "labels.jsonl"])


def test_comparisons_and_ratings_are_not_mixed(tmp_path):
    write_rows(tmp_path / "a.parquet", make_answers(1))
    write_rows(tmp_path / "b.parquet", [{"prompt": "a", "image": GOOD, "rating": 1}])
    with pytest.raises(LabelFileError, match="one kind"):
        read_labels([tmp_path / "a.parquet", tmp_path / "b.parquet"])


def test_folders_are_searched_at_any_depth_and_digests_ignore_places(tmp_path):
    for folder in ("x/turn-1", "x/turn-2", "y"):
        (tmp_path / folder).mkdir(parents=True)
    write_rows(tmp_path / "x/turn-1/labels.parquet", make_answers(2))
    write_rows(tmp_path / "x/turn-2/labels.parquet", make_answers(3, seed=5))
    labels = read_labels([tmp_path / "x"])
    assert len(labels.judgements) == 5
    (tmp_path / "x").rename(tmp_path / "z")
    assert read_labels([tmp_path / "z"]).digest == labels.digest
    with pytest.raises(LabelFileError, match="no labels.parquet"):
        read_labels([tmp_path / "y"])
