"""What follows from the answers: a pairs file to train on, and the evidence that a person attaches
to an approval.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ebbflow.data.images import is_animated
from ebbflow.data.labels import LABELS
from ebbflow.data.pairs import IMAGES, LATENTS, check_pairs
from ebbflow.labeling.answers import Answer
from ebbflow.labeling.session import Session
from ebbflow.labeling.sources import SIDES, LabelPair
from ebbflow.recipe.base import sanitize_text
from ebbflow.storage.disk import sha256_of_file, write_text
from ebbflow.storage.tables import write_table

PAIRS = "pairs.parquet"
EVIDENCE = "evidence.json"
PAGE = "evidence.md"

logger = logging.getLogger(__name__)


def write_results(session: Session) -> None:
    """Write ``pairs.parquet``, ``labels.parquet``, ``evidence.json`` and ``evidence.md`` into the
    session's folder, each whole or not at all.

    Raises:
        DiskFullError: no space was left.
    """
    evidence = build_evidence(session)
    write_pairs(session, session.folder / PAIRS)
    write_labels(session, session.folder / LABELS)
    # ``allow_nan``: NaN is no JSON, and other programs could not read the file.
    text = json.dumps(evidence, indent=2, ensure_ascii=False, allow_nan=False)
    write_text(session.folder / EVIDENCE, text + "\n")
    write_text(session.folder / PAGE, render_markdown(evidence))


# The pairs file.


def write_pairs(session: Session, path: Path) -> int:
    """Write the pairs of pictures of which more raters prefer one side than the other, and return
    their number. Without such a pair there is no file.
    """
    # Pair key to the votes for picture 0, for picture 1, and None for ties.
    votes = {
        key: Counter(answer.preferred_picture for answer in answers)
        for key, answers in session.group_answers_by_pair().items()
    }
    # Pairs with as many votes for either picture have no preference to train on.
    chosen = {
        key: 0 if counts[0] > counts[1] else 1
        for key, counts in votes.items()
        if counts[0] != counts[1]
    }
    pairs = [session.pairs[key] for key in session.pairs if key in chosen]
    videos = _list_videos_without_latent(pairs)
    if not pairs or videos:
        # An undo may have removed the last decided pair: an older file would be wrong.
        path.unlink(missing_ok=True)
        reason = (
            f"{videos[0].key} is a video without its latent" if videos else "no pair is decided yet"
        )
        logger.info("no pairs file: %s", reason)
        return 0
    table = _build_pairs_table(pairs, chosen, votes)
    write_table(
        path,
        table.schema,
        table.to_batches(),
        {"answers_sha256": sha256_of_file(session.answers.path)},
    )
    # The check that a stage on pairs makes as it starts, while the raters are still here.
    check_pairs(path)
    return len(pairs)


def _list_videos_without_latent(pairs: Sequence[LabelPair]) -> list[LabelPair]:
    """Return the videos that a pairs file cannot hold: its images are stills."""
    return [
        pair
        for pair in pairs
        if pair.pictures[0].latent is None and is_animated(pair.pictures[0].png)
    ]


def _build_pairs_table(
    pairs: list[LabelPair], chosen: dict[str, int], votes: dict[str, Counter[int | None]]
) -> pa.Table:
    # ``chosen`` is 0 or 1, so that ``chosen ^ 1`` is the other picture.
    sides = [[pair.pictures[chosen[pair.key] ^ rejected] for pair in pairs] for rejected in (0, 1)]
    columns: dict[str, pa.Array] = {"prompt": pa.array([pair.prompt for pair in pairs])}
    for names, pictures in zip(zip(IMAGES, LATENTS, strict=True), sides, strict=True):
        # Latents, where the pictures have them: encoding a picture again would change it.
        latents = [picture.latent for picture in pictures if picture.latent is not None]
        if latents:
            columns[names[1]] = pa.FixedShapeTensorArray.from_numpy_ndarray(np.stack(latents))
        else:
            columns[names[0]] = pa.array([picture.png for picture in pictures], pa.binary())
    columns["pair"] = pa.array([pair.key for pair in pairs])
    columns["votes_chosen"] = pa.array(
        [votes[pair.key][chosen[pair.key]] for pair in pairs], pa.int64()
    )
    columns["votes_rejected"] = pa.array(
        [votes[pair.key][1 - chosen[pair.key]] for pair in pairs], pa.int64()
    )
    return pa.table(columns)


# The labels file.


def write_labels(session: Session, path: Path) -> None:
    """Write every standing answer in the layout of Pick-a-Pic, ties included: what a reward model
    is trained on. Without an answer there is no file.
    """
    answers = session.answers.standing
    pictures = [session.pairs[answer.pair].pictures for answer in answers]
    # A reward model scores images.
    if not answers or any(is_animated(pair[0].png) for pair in pictures):
        path.unlink(missing_ok=True)
        return
    # Label 0 is 1 where the first picture is preferred, 0 where the second is, .5 for a tie.
    preferences = [
        0.5 if answer.preferred_picture is None else 1.0 - answer.preferred_picture
        for answer in answers
    ]
    table = pa.table(
        {
            "caption": pa.array([session.pairs[answer.pair].prompt for answer in answers]),
            "jpg_0": pa.array([first.png for first, _ in pictures], pa.binary()),
            "jpg_1": pa.array([second.png for _, second in pictures], pa.binary()),
            "label_0": pa.array(preferences, pa.float64()),
            "label_1": pa.array([1 - preference for preference in preferences], pa.float64()),
            "user_id": pa.array([answer.rater for answer in answers]),
        }
    )
    write_table(path, table.schema, table.to_batches(), {})


# The evidence.


def build_evidence(session: Session) -> dict[str, Any]:
    """Return what was compared, how, by whom, and what they said, as JSON data.

    Example:
        An excerpt, of a comparison that the test has decided::

            {"kind": "comparison", "decision": "candidate",
             "answers": {"champion": 11, "candidate": 31, "tie": 4, "left": 20},
             "raters": {"Ada": {"champion": 6, "candidate": 15, "tie": 2, "left": 10}, ...},
             "pairs": {"all": 200, "answered": 46, ...}, ...}
    """
    # Every number here can be computed again from ``answers.jsonl``, whose digest stands at the
    # end.
    by_pair = session.group_answers_by_pair()
    test = session.run_test()
    standing = session.answers.standing
    # Pairs of one policy have no sides, and nothing is tested.
    names = SIDES if test else ("first", "second")
    return {
        "kind": session.task.kind,
        "policies": dict(zip(SIDES if test else ("policy",), session.task.names, strict=True)),
        "decision": None if test is None else (test.preferred or "undecided"),
        "test": None if test is None else {"error_rate": session.settings.error_rate, **vars(test)},
        "pairs": {
            "all": len(session.pairs),
            "answered": len(by_pair),
            "left_out_identical": session.task.identical,
            "left_out_on_one_side_only": session.task.missing,
        },
        "answers": _count_answers(standing, names),
        "raters": {
            rater: _count_answers(answers, names)
            for rater, answers in _group_by_rater(standing).items()
        },
        "krippendorff_alpha": session.measure_agreement(),
        "pairs_with_several_raters": sum(len(answers) > 1 for answers in by_pair.values()),
        "first_answer": standing[0].at if standing else None,
        "last_answer": standing[-1].at if standing else None,
        "seed": session.settings.seed,
        "files": {role: str(path) for role, path in session.task.files.items()},
        "sha256": session.task.file_digests | {"answers": sha256_of_file(session.answers.path)},
    }


def _group_by_rater(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    return {
        rater: [answer for answer in answers if answer.rater == rater]
        for rater in sorted({answer.rater for answer in answers})
    }


def _count_answers(answers: Sequence[Answer], names: Sequence[str]) -> dict[str, int]:
    """Return how often each picture was preferred, and how often the one on the left.

    Each picture is on the left equally often, so a rater who looks at the pictures chooses the left
    one about half of the time.
    """
    preferred = Counter(answer.preferred_picture for answer in answers)
    return {
        names[0]: preferred[0],
        names[1]: preferred[1],
        "tie": preferred[None],
        "left": sum(answer.answer == "left" for answer in answers),
    }


def render_markdown(evidence: dict[str, Any]) -> str:
    """Return the evidence as one page of Markdown."""
    sides = [name for name in evidence["answers"] if name not in ("tie", "left")]
    alpha = evidence["krippendorff_alpha"]
    rows = [
        *((role, _escape_text(name)) for role, name in evidence["policies"].items()),
        ("pairs answered", f"{evidence['pairs']['answered']} of {evidence['pairs']['all']}"),
        ("left out, same picture on both sides", evidence["pairs"]["left_out_identical"]),
        (
            "agreement of raters (Krippendorff's alpha)",
            "not measured" if alpha is None else f"{alpha:.2f}",
        ),
        ("pairs with several raters", evidence["pairs_with_several_raters"]),
        (
            "first and last answer (UTC)",
            f"{evidence['first_answer'] or '–'}, {evidence['last_answer'] or '–'}",
        ),
        *(
            (f"sha256, {_escape_text(role)}", f"`{digest}`")
            for role, digest in evidence["sha256"].items()
        ),
    ]
    raters = [
        (_escape_text(rater), counts[sides[0]], counts[sides[1]], counts["tie"], counts["left"])
        for rater, counts in [*evidence["raters"].items(), ("all", evidence["answers"])]
    ]
    header = (
        "rater",
        f"prefers the {sides[0]}",
        f"prefers the {sides[1]}",
        "tie",
        "chose the left side",
    )
    parts = [
        "# Preferences of people",
        _render_conclusion(evidence),
        _render_table(("", ""), rows),
        _render_table(header, raters),
        _render_method(evidence),
    ]
    return "\n\n".join(parts) + "\n"


def _render_conclusion(evidence: dict[str, Any]) -> str:
    test = evidence["test"]
    if test is None:
        return "Pairs of one policy: nothing is tested."
    outcomes = test["candidate"] + test["champion"]
    share = f"{test['candidate']} of {outcomes}" if outcomes else "none"
    # The interval is valid at all times together, so it may be read before the test has decided.
    interval = (
        f"confidence sequence of the share {test['low']:.3f} to {test['high']:.3f}, p ="
        f" {test['p_value']:.2g}"
    )
    conclusion = {
        "candidate": "**Raters prefer the candidate.**",
        "champion": "**Raters prefer the champion.**",
        "undecided": "**Undecided.**",
    }[evidence["decision"]]
    after = (
        "" if test["decided_after"] is None else f" The test decided after {test['decided_after']}."
    )
    return (
        f"{conclusion} Of the pairs that were no ties, the candidate was preferred in {share}"
        f" ({interval}).{after}"
    )


def _render_method(evidence: dict[str, Any]) -> str:
    blind = (
        "Raters did not see which policy drew which picture. The order of the pairs and the sides"
        f" depend on the seed ({evidence['seed']}) and the rater's name."
    )
    if evidence["test"] is None:
        return blind
    return (
        f"{blind} The test is a mixture sequential probability ratio test with error rate"
        f" {evidence['test']['error_rate']}; it may be looked at after every answer. The first"
        " answer on each pair counts, ties do not."
    )


def _render_table(header: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _escape_text(text: str) -> str:
    """Return text that somebody else wrote as a cell of a table, without markup."""
    # As numeric entities, which Markdown and HTML both show as the character itself.
    return "".join(
        f"&#{ord(letter)};" if letter in "&<>|`*_[]\\!#~" else letter
        for letter in sanitize_text(text, 200)
    )
