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
    """Write ``pairs.parquet``, ``evidence.json`` and ``evidence.md`` into the session's folder,
    each whole or not at all.

    Raises:
        DiskFullError: no space was left.
    """
    found = build_evidence(session)
    write_pairs(session, session.folder / PAIRS)
    write_text(
        session.folder / EVIDENCE,
        json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False) + "\n",
    )
    write_text(session.folder / PAGE, render_markdown(found))


# The pairs file.


def write_pairs(session: Session, path: Path) -> int:
    """Write a pair for each pair of pictures of which more raters prefer one side than the other;
    returns their number.

    Latents are written where the pictures have them: encoding a picture again would change it.
    Without a pair there is no file.
    """
    votes = {
        key: Counter(answer.preferred_picture for answer in answers)
        for key, answers in session.group_answers_by_pair().items()
    }
    chosen = {
        key: 0 if counts[0] > counts[1] else 1
        for key, counts in votes.items()
        if counts[0] != counts[1]
    }
    pairs = [session.pairs[key] for key in session.pairs if key in chosen]
    if not pairs or (animated := _list_videos_without_latent(pairs)):
        path.unlink(missing_ok=True)
        logger.info(
            "no pairs file: %s",
            (
                f"{animated[0].key} is a video without its latent"
                if pairs
                else "no pair is decided yet"
            ),
        )
        return 0
    table = _build_pairs_table(pairs, chosen, votes)
    write_table(
        path,
        table.schema,
        table.to_batches(),
        {"answers_sha256": sha256_of_file(session.answers.path)},
    )
    check_pairs(path)
    return len(pairs)


def _list_videos_without_latent(pairs: Sequence[LabelPair]) -> list[LabelPair]:
    """The videos that a pairs file cannot hold: its images are stills."""
    return [
        pair
        for pair in pairs
        if pair.pictures[0].latent is None and is_animated(pair.pictures[0].png)
    ]


def _build_pairs_table(
    pairs: list[LabelPair], chosen: dict[str, int], votes: dict[str, Counter[int | None]]
) -> pa.Table:
    sides = [[pair.pictures[chosen[pair.key] ^ rejected] for pair in pairs] for rejected in (0, 1)]
    columns: dict[str, pa.Array] = {"prompt": pa.array([pair.prompt for pair in pairs])}
    for names, pictures in zip(zip(IMAGES, LATENTS, strict=True), sides, strict=True):
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


# The evidence.


def build_evidence(session: Session) -> dict[str, Any]:
    """What was compared, how, by whom, and what they said, for programs."""
    by_pair = session.group_answers_by_pair()
    test = session.run_test()
    standing = session.answers.standing
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
        rater: [one for one in answers if one.rater == rater]
        for rater in sorted({one.rater for one in answers})
    }


def _count_answers(answers: Sequence[Answer], names: Sequence[str]) -> dict[str, int]:
    """How often each side was preferred, and how often the left one, which is each side equally
    often.
    """
    preferred = Counter(answer.preferred_picture for answer in answers)
    return {
        names[0]: preferred[0],
        names[1]: preferred[1],
        "tie": preferred[None],
        "left": sum(answer.answer == "left" for answer in answers),
    }


def render_markdown(found: dict[str, Any]) -> str:
    """The evidence on one page, for people."""
    sides = [name for name in found["answers"] if name not in ("tie", "left")]
    alpha = found["krippendorff_alpha"]
    rows = [
        *((f"{role}", _escape_text(name)) for role, name in found["policies"].items()),
        ("pairs answered", f"{found['pairs']['answered']} of {found['pairs']['all']}"),
        ("left out, same picture on both sides", found["pairs"]["left_out_identical"]),
        (
            "agreement of raters (Krippendorff's alpha)",
            "not measured" if alpha is None else f"{alpha:.2f}",
        ),
        ("pairs with several raters", found["pairs_with_several_raters"]),
        (
            "first and last answer (UTC)",
            f"{found['first_answer'] or '–'}, {found['last_answer'] or '–'}",
        ),
        *(
            (f"sha256, {_escape_text(role)}", f"`{digest}`")
            for role, digest in found["sha256"].items()
        ),
    ]
    raters = [
        (_escape_text(rater), counts[sides[0]], counts[sides[1]], counts["tie"], counts["left"])
        for rater, counts in [*found["raters"].items(), ("all", found["answers"])]
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
        _render_conclusion(found),
        _render_table(("", ""), rows),
        _render_table(header, raters),
        _render_method(found),
    ]
    return "\n\n".join(parts) + "\n"


def _render_conclusion(found: dict[str, Any]) -> str:
    test = found["test"]
    if test is None:
        return "Pairs of one policy: nothing is tested."
    outcomes = test["candidate"] + test["champion"]
    share = f"{test['candidate']} of {outcomes}" if outcomes else "none"
    interval = (
        f"confidence sequence of the share {test['low']:.3f} to {test['high']:.3f}, p ="
        f" {test['p_value']:.2g}"
    )
    said = {
        "candidate": "**Raters prefer the candidate.**",
        "champion": "**Raters prefer the champion.**",
        "undecided": "**Undecided.**",
    }[found["decision"]]
    after = (
        "" if test["decided_after"] is None else f" The test decided after {test['decided_after']}."
    )
    return (
        f"{said} Of the pairs that were no ties, the candidate was preferred in {share}"
        f" ({interval}).{after}"
    )


def _render_method(found: dict[str, Any]) -> str:
    blind = (
        "Raters did not see which policy drew which picture. The order of the pairs and the sides"
        f" depend on the seed ({found['seed']}) and the rater's name."
    )
    if found["test"] is None:
        return blind
    return (
        f"{blind} The test is a mixture sequential probability ratio test with error rate"
        f" {found['test']['error_rate']}; it may be looked at after every answer. The first answer"
        " on each pair counts, ties do not."
    )


def _render_table(header: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _escape_text(text: str) -> str:
    """Text that somebody else wrote, as a cell of a table: no markup."""
    return "".join(
        f"&#{ord(letter)};" if letter in "&<>|`*_[]\\!#~" else letter
        for letter in sanitize_text(text, 200)
    )
