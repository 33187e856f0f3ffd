"""A certificate as a page for people, in Markdown."""

from __future__ import annotations

from ebbflow.certification.certificate import Certificate, Line, Measure

NAMES = {
    "schedule": "the sigmas are those of the model's family",
    "noise": "x_T and the noise of every step are those that the request names",
    "text encoding": "texts are encoded as the trainer encodes them",
    "base model": "what two deterministic steps of the base model add to x_T",
    "transition": "mean and standard deviation of every step, for every stochastic sampler",
    "log-probs": "they are those of the engine's own means and latents",
    "guidance": "classifier-free guidance, or the guidance that the network takes",
    "prompts": "every sample shows its own prompt, beside prompts of other lengths",
    "batch invariance": "the same samples alone, in pairs, in another order and in one batch",
    "cut and resumed requests": "a request that is repeated, or resumed after a cut",
    "full weights": "all parameters are replaced",
    "every adapted layer": "the adapter of each layer alone",
    "weight versions": "the next request shows a push; an older version is refused, or named",
    "drift": "many small updates, one push each, add up",
}
"""What a line looks at; the others are kinds of adapters."""


def write_page(certificate: Certificate, source: str) -> str:
    """Write the page.

    Args:
        source: where the certificate is, or the command that wrote it.
    """
    model = certificate.model
    title = f"# {certificate.engine} with {model['family']}: {certificate.verdict}"
    size = f"{model['height']} x {model['width']}"
    # The id of the key only: the signature itself is in the JSON.
    signed = certificate.signature.split(":")[1] if certificate.signature else ""
    settings = certificate.settings
    facts = [
        f"Measured {certificate.measured} by `{source}`, "
        + (f"signed with the key `{signed}`." if signed else "**not signed**."),
        "",
        f"- Model: {model['family']}, `{model['folder']}`, {size}, guidance {model['guidance']:g},"
        f" trainer in {model['precision']}, engine in {model['engine_precision']}; digest of the"
        f" folder `{model['digest'][:16]}`.",
        f"- Samples: {settings['steps']} denoising steps, {settings['samples']} samples of each"
        f" prompt, {settings['updates']} updates for the drift.",
        "- Versions: "
        + ", ".join(f"{name} {version}" for name, version in certificate.versions.items())
        + ".",
        f"- Machine of the trainer: {certificate.machine}.",
        "",
    ]
    table = ["| line | verdict | number | passes | |", "|---|---|---|---|---|"]
    for line in certificate.lines:
        table += _write_rows(line)
    return "\n".join([title, "", *facts, *table, "", FOOTER])


def _write_rows(line: Line) -> list[str]:
    what = NAMES.get(line.name, "an update of these adapters shows")
    note = line.note.replace("|", "/").replace("\n", " ")
    if not line.measures:
        return [f"| **{line.name}**: {what} | {line.verdict} | | | {note} |"]
    rows = []
    for number, measure in enumerate(line.measures):
        # The first row of a line names it, the others are further numbers of it.
        first = f"**{line.name}**: {what}" if number == 0 else ""
        verdict = line.verdict if number == 0 else ""
        name = f"{measure.name}{f'; {note}' if note and number == 0 else ''}"
        rows.append(
            f"| {first} | {verdict} | {measure.value:.4g} | {_write_bounds(measure)} | {name} |"
        )
    return rows


def _write_bounds(measure: Measure) -> str:
    if measure.low is None and measure.high is None:
        return "shown only"
    if measure.low is None:
        return f"≤ {measure.high:.3g}"
    if measure.high is None:
        return f"≥ {measure.low:.3g}"
    # Counts and versions must be equal to something.
    if measure.low == measure.high:
        return f"= {measure.low:g}"
    return f"{measure.low:.4g} to {measure.high:.4g}"


FOOTER = """`not supported`: the engine does not offer it, or the model does not. `not measured`:
another line failed that it depends on, or rounding hides it; the last column says which. Bars of
steps come from the policy's own rounding in the engine's precision.
"""
