"""The result of a certification: lines with a verdict and the numbers behind it, signed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ebbflow.registry.signing import SignatureError, check_text, sign_text

FORMAT = 1
Verdict = Literal["passed", "failed", "not supported", "not measured"]
EXIT_STATUS = {"passed": 0, "failed": 1, "not measured": 3}
"""By the verdict of a certificate; click has 2."""
NETWORK = "base model"
"""The line about the network, without which an engine has shown nothing."""


class CertificateError(ValueError):
    """A file is no certificate, or not what was signed."""


@dataclass(frozen=True)
class Measure:
    """A number, and the bounds between which it passes; both belong to them.

    Example:
        ``Measure("share of the adapters' effect", 0.998, 0.9, 1.1)``

    Attributes:
        name: what was measured, with its unit.
        low, high: None where there is no such bound.
    """

    name: str
    value: float
    low: float | None = None
    high: float | None = None

    @property
    def passes(self) -> bool:
        # Not ``<`` and ``>``, which a NaN would pass.
        above = self.low is None or self.value >= self.low
        below = self.high is None or self.value <= self.high
        return self.value == self.value and above and below


@dataclass(frozen=True)
class Line:
    """One thing that the certificate looks at.

    Attributes:
        name: what is looked at.
        verdict: ``not supported``: the engine does not offer it. ``not measured``: it could not be
            told from another fault, or the rounding hides it.
        measures: the numbers, those that decided first.
        note: what the numbers do not say: the place of the worst one, the error, or the reason.
    """

    name: str
    verdict: Verdict
    measures: tuple[Measure, ...] = ()
    note: str = ""


def find_largest(values: Iterable[float]) -> float:
    """Return the largest of some numbers; NaN if one of them is, which ``max`` passes over unless
    it comes first.
    """
    return max(values, key=lambda value: (math.isnan(value), value))


def judge_line(name: str, measures: Sequence[Measure], note: str = "") -> Line:
    """Build a line that passes if all of its numbers do."""
    # A line without numbers has shown nothing, and must not pass.
    passes = bool(measures) and all(measure.passes for measure in measures)
    # The numbers that failed come first, because a reader of the table looks no further.
    ordered = sorted(measures, key=lambda measure: measure.passes)
    return Line(name, "passed" if passes else "failed", tuple(ordered), note)


@dataclass(frozen=True)
class Certificate:
    """All lines about one engine and one model.

    Attributes:
        engine: as the command names it.
        versions: of the engine, of the trainer and of their packages.
        model: family, precision, size, guidance, and the digest of the base-model folder.
        settings: what was generated: steps, samples, adapters, updates.
        machine: of the trainer's side.
        measured: date and time, UTC.
        signature: as ``registry.signing`` writes it; empty without a key.
    """

    engine: str
    versions: Mapping[str, str]
    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    machine: str
    measured: str
    lines: tuple[Line, ...]
    signature: str = ""
    format: int = field(default=FORMAT)

    @property
    def verdict(self) -> Verdict:
        """``failed`` if a line has; else ``not measured`` if a line could not be, or nothing was
        generated; else ``passed``: what an engine does not offer, it cannot do wrong.
        """
        verdicts = {line.name: line.verdict for line in self.lines}
        if "failed" in verdicts.values():
            return "failed"
        if "not measured" in verdicts.values() or verdicts.get(NETWORK) != "passed":
            return "not measured"
        return "passed"

    def to_json(self) -> str:
        """Write the certificate as JSON."""
        # Sorted, so that equal certificates have equal bytes.
        content = self._describe() | {"signature": self.signature}
        return json.dumps(content, indent=1, sort_keys=True) + "\n"

    def sign(self) -> Certificate:
        """Sign it with the deployment's key; without one, it stays unsigned.

        Raises:
            SignatureError: the key cannot be read.
        """
        return Certificate(**vars(self) | {"signature": sign_text(self._encode()) or ""})

    def check_signature(self) -> str:
        """Check that this is what was signed; return the id of the key.

        Raises:
            CertificateError: it has no signature, one of an unknown key, or was changed.
        """
        try:
            return check_text(self.signature, self._encode(), "the certificate")
        except SignatureError as error:
            raise CertificateError(str(error)) from None

    def _describe(self) -> dict[str, Any]:
        content = asdict(self) | {"verdict": self.verdict}
        content.pop("signature")
        for line in content["lines"]:
            for measure in line["measures"]:
                # JSON has no NaN and no infinity.
                if not math.isfinite(measure["value"]):
                    measure["value"] = None
        return content

    def _encode(self) -> bytes:
        # Without white space: how a file is indented is not part of what was signed.
        return json.dumps(self._describe(), sort_keys=True, separators=(",", ":")).encode()


def read_certificate(file: Path) -> Certificate:
    """Read what ``Certificate.to_json`` has written.

    Raises:
        CertificateError: the file is none.
    """
    try:
        content = json.loads(file.read_text())
        content.pop("verdict")  # follows from the lines
        lines = tuple(
            Line(**line | {"measures": tuple(map(_read_measure, line["measures"]))})
            for line in content.pop("lines")
        )
        certificate = Certificate(lines=lines, **content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CertificateError(
            f"{file} is no certificate of `ebbflow certify` ({type(error).__name__}: {error});"
            " give the file certificate.json"
        ) from None
    # Another format may mean other things by the same names.
    if certificate.format != FORMAT:
        raise CertificateError(
            f"{file} has format {certificate.format}, this release reads {FORMAT}; use the release"
            " that wrote it"
        )
    return certificate


def _read_measure(content: dict[str, Any]) -> Measure:
    value = content["value"]
    return Measure(**content | {"value": math.nan if value is None else value})
