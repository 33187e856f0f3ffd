"""``ebbflow make-key``, ``sign`` and ``adopt``: the signatures of registered versions."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ebbflow.commands.loading import REGISTRY, import_libraries
from ebbflow.commands.options import STORE, OutputPath
from ebbflow.recipe import Recipe, RecipeError, load_recipe


@click.command("make-key")
@click.argument("folder", type=OutputPath())
def make_key(folder: Path) -> None:
    """Make the ed25519 key pair of a deployment, which signs registered versions, in FOLDER.

    The private key stays with the pipeline (EBBFLOW_SIGNING_KEY), the public one goes to whatever
    serves or verifies (EBBFLOW_VERIFY_KEYS).
    """
    with import_libraries("loading MLflow, which takes seconds"):
        from ebbflow.registry.signing import (  # imports MLflow
            SIGNING_KEY,
            VERIFY_KEYS,
            create_key_pair,
        )
        from ebbflow.tracking.store import TrackingError

    try:
        private, public = create_key_pair(folder)
    except TrackingError as error:
        sys.exit(str(error))
    click.echo(f"export {SIGNING_KEY}={private.absolute()}   # where versions are registered")
    click.echo(f"export {VERIFY_KEYS}={public.absolute()}   # where they are used")


@click.command()
@click.argument("model", metavar="MODEL[@ALIAS]")
@STORE
def sign(model: str, recipe: Path | None) -> None:
    """Sign a registered version with the key of this deployment, if it verifies.

    New versions are signed as they are registered: this is for those from before there was a key,
    and for a new key. MODEL alone means its champion; MODEL/3 is version 3.
    """
    with import_libraries(REGISTRY):
        from ebbflow.registry.signing import (  # imports MLflow
            SIGNING_KEY,
            require_no_broken_signature,
            sign_version,
        )
        from ebbflow.tracking.store import TrackingError, connect_to_store, resolve_tracking_uri
        from ebbflow.verification.checks import verify_version

    try:
        uri = resolve_tracking_uri(load_recipe(recipe) if recipe else Recipe())
        version, checks = verify_version(uri, model)
        # The missing signature is why the command is called.
        failed = [check for check in checks if check.status == "FAILED"]
        failed = [check for check in failed if check.name != "signature"]
        if failed:
            lines = "\n".join(map(str, failed))
            sys.exit(
                f"not signed:\n{lines}\nA version that the gate of an earlier release let through"
                f" can be adopted: `ebbflow adopt {model} --reason ...`"
            )
        require_no_broken_signature(version)
        client = connect_to_store(uri)
        key = sign_version(client, version.name, str(version.version), verified=version)
    except (RecipeError, TrackingError) as error:
        sys.exit(str(error))
    if key is None:
        sys.exit(f"{SIGNING_KEY} is not set; make a key with `ebbflow make-key FOLDER`")
    click.echo(f"{version.name} version {version.version} is signed with the key {key}")


@click.command()
@click.argument("model", metavar="MODEL[@ALIAS]")
@click.option("--reason", required=True, help="Why the version is trusted, for the record.")
@STORE
def adopt(model: str, reason: str, recipe: Path | None) -> None:
    """Adopt a registered version that the gate of another release let through, and sign it.

    Its decision cannot be made again by the rules of this release. Its files must be what was
    registered; what else does not verify is recorded with who, when and why. MODEL alone means its
    champion; MODEL/3 is version 3.
    """
    with import_libraries(REGISTRY):
        from ebbflow.registry.signing import is_signing_configured  # imports MLflow
        from ebbflow.tracking.store import TrackingError, resolve_tracking_uri
        from ebbflow.verification.adoption import adopt_version
        from ebbflow.verification.checks import verify_version

    try:
        uri = resolve_tracking_uri(load_recipe(recipe) if recipe else Recipe())
        version, checks = verify_version(uri, model)
        adoption = adopt_version(uri, version, checks, reason)
    except (RecipeError, TrackingError) as error:
        sys.exit(str(error))
    signed = " and signed" if is_signing_configured() else ""
    click.echo(
        f"{version.name} version {version.version} is adopted{signed}, although"
        f" {', '.join(adoption.failed)} did not verify"
    )
