"""Signatures of versions: an ed25519 key of the deployment over the digests of a version.

Digests are tags, and whoever can write tags and artifacts can make them agree. Who has no private
key cannot make the signature agree. Nobody needs a key: without one, nothing is signed and nothing
is asked for. Once a key is configured, a version without a valid signature is refused.

    EBBFLOW_SIGNING_KEY   the private key, which signs: PEM text, or the path of a file
    EBBFLOW_VERIFY_KEYS   the public keys, any of which may have signed: PEM blocks, or a path
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion

from ebbflow.registry.model_version import BASE_STORED, RegistryError
from ebbflow.tracking.store import DIGEST, RUN

SIGNING_KEY = "EBBFLOW_SIGNING_KEY"
VERIFY_KEYS = "EBBFLOW_VERIFY_KEYS"
"""Environment variables; see the docstring of the module."""
SIGNATURE = "ebbflow.signature"
PROMOTION_SIGNATURE = "ebbflow.promotion_signature"
PROMOTION = "ebbflow.promotion"
ADOPTED = "ebbflow.adopted"
ATTESTATION = "ebbflow.attestation"
"""Tags: the signature of what was registered, that of its promotion, the record of the promotion
(``promotion.describe_promotion``) and that of an adoption (``verification.adoption``), and the
signature with which a version is created, before it has a number.
"""
SIGNED_SUFFIX = "_digest"
SIGNED_TAGS = {BASE_STORED, DIGEST, RUN, ADOPTED, "ebbflow.compared_with", "ebbflow.decision"}
"""What is signed of a version: its name and number, its run, these tags, and every tag that ends
with ``SIGNED_SUFFIX``. A tag that is added, changed or deleted changes the text.
"""
_TEXT = b"ebbflow certificate\n"
"""Stands before signed texts that are no versions, so that neither can pass for the other."""
PEM_BLOCK = re.compile(r"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", re.DOTALL)
PRIVATE_FILE = "signing_key.pem"
PUBLIC_FILE = "verify_keys.pem"


class SignatureError(RegistryError):
    """A version is not signed by a key of this deployment, or a key cannot be used."""


def create_key_pair(folder: Path) -> tuple[Path, Path]:
    """Create a private and a public key in ``folder``; return both files.

    Raises:
        SignatureError: one of them is there already; nothing is overwritten.
    """
    private = folder / PRIVATE_FILE
    public = folder / PUBLIC_FILE
    for path in (private, public):
        if path.exists():
            raise SignatureError(f"{path} exists already; give another folder, or move it away")
    folder.mkdir(parents=True, exist_ok=True)
    key = Ed25519PrivateKey.generate()
    content = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    # Created with its mode: a file that is made private afterwards was open for a moment.
    with open(os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    public.write_bytes(
        key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


def is_signing_configured() -> bool:
    """Whether versions must be signed here: a private or a public key is configured."""
    # Also where one is set and empty, as by $(cat missing.pem): that must not switch checks off.
    return SIGNING_KEY in os.environ or VERIFY_KEYS in os.environ


def sign_version(
    client: MlflowClient, name: str, version: str, verified: ModelVersion | None = None
) -> str | None:
    """Sign what a version is, and its promotion where there is one; return the id of the key.
    Without a private key nothing is done. Idempotent: an ed25519 signature of the same text is the
    same.

    Args:
        verified: the version as it was when it was verified.

    Raises:
        SignatureError: the key cannot be read, or the version is not what was verified.
    """
    key = _read_private_key()
    if key is None:
        return None
    signed = client.get_model_version(name, version)
    # A verification takes minutes, and the store may belong to somebody else.
    if verified is not None and compute_content_digest(signed) != compute_content_digest(verified):
        raise SignatureError(
            f"{name!r} version {version} has changed since it was verified, and is not signed; find"
            " out who changed it"
        )
    client.set_model_version_tag(name, version, SIGNATURE, _sign_text(key, _describe(signed)))
    promotion = signed.tags.get(PROMOTION)
    if promotion:
        signature = _sign_text(key, _describe_promotion(signed))
        client.set_model_version_tag(name, version, PROMOTION_SIGNATURE, signature)
    return _identify(key.public_key())


def sign_text(text: bytes) -> str | None:
    """Sign a text that is no version, such as a certificate; None without a private key.

    Raises:
        SignatureError: the key cannot be read.
    """
    key = _read_private_key()
    return None if key is None else _sign_text(key, _TEXT + text)


def check_text(signature: str, text: bytes, named: str) -> str:
    """Check a signature of ``sign_text``; return the id of the key.

    Args:
        named: what was signed, for the error.

    Raises:
        SignatureError: it is missing, of a key that is not known here, or of another text.
    """
    if not signature:
        raise SignatureError(f"{named} has no signature; make it where {SIGNING_KEY} is set")
    return _check_value(
        signature,
        _read_public_keys(),
        _TEXT + text,
        named,
        "the signature does not match its content",
    )


def attest_registration(name: str, run_id: str, tags: dict[str, str]) -> dict[str, str]:
    """Return the tags of a new version with the signature of its content and run; without a private
    key, unchanged. A retry of the run recognises its own version by it.

    Raises:
        SignatureError: the key cannot be read.
    """
    key = _read_private_key()
    if key is None:
        return tags
    return tags | {ATTESTATION: _sign_text(key, _describe_registration(name, run_id, tags))}


def require_attestation(version: ModelVersion, run_id: str) -> None:
    """Check that a version was created by a run, before it is signed.

    Raises:
        SignatureError: a private key is configured, and the version was made by something else.
    """
    if _read_private_key() is None:
        return
    keys = _read_public_keys()
    # One that a person has signed with ``ebbflow sign`` needs no other proof.
    if SIGNATURE in version.tags:
        _check_signature(version, keys, SIGNATURE, _describe(version))
        return
    text = _describe_registration(version.name, run_id, version.tags)
    fix = (
        f"if it was registered before there was a key, verify and sign it with `ebbflow sign"
        f" {version.name}/{version.version}`; else delete it, and run {run_id} registers its own"
    )
    _check_signature(version, keys, ATTESTATION, text, fix)


def require_no_broken_signature(version: ModelVersion) -> None:
    """Check that a version has no signature of a known key that does not match, before a person
    signs it: the new signature would hide that it was changed.

    Raises:
        SignatureError: it has.
    """
    value = version.tags.get(SIGNATURE)
    if not value or not is_signing_configured():
        return
    keys = _read_public_keys()
    # One of another key is replaced, as when a new key takes over.
    _, _, rest = value.partition(":")
    if rest.partition(":")[0] in keys:
        _check_signature(version, keys, SIGNATURE, _describe(version))


def compute_content_digest(version: ModelVersion) -> str:
    """Compute the sha256 of everything that is signed of a version but its adoption."""
    tags = _select_signed_tags(version.tags)
    tags.pop(ADOPTED, None)
    return hashlib.sha256(
        _encode(version, {"tags": tags, "run_id": version.run_id or ""})
    ).hexdigest()


def require_signature(version: ModelVersion, promoted: bool = False) -> str | None:
    """Check the signature of a version; return the id of the key, or None where no key is
    configured.

    Args:
        promoted: also check the signature of its promotion, as of a champion.

    Raises:
        SignatureError: a key is configured, and a signature is missing or does not match.
    """
    if not is_signing_configured():
        return None
    keys = _read_public_keys()
    key_id = _check_signature(version, keys, SIGNATURE, _describe(version))
    if promoted:
        _check_signature(version, keys, PROMOTION_SIGNATURE, _describe_promotion(version))
    return key_id


def require_signing_key(candidate: str) -> None:
    """Check that a promotion can be signed where it must be, before anything of it is written.

    Args:
        candidate: what is to be promoted, for the error.

    Raises:
        SignatureError: a key is configured, and the private one is not or cannot be read.
    """
    if is_signing_configured() and _read_private_key() is None:
        raise SignatureError(
            f"{candidate} cannot become champion here: {SIGNING_KEY} is not set, so that its"
            " promotion cannot be signed, and nobody would accept it"
        )


def _describe(version: ModelVersion) -> bytes:
    """Return the text that the signature of a version is of."""
    tags = _select_signed_tags(version.tags)
    return _encode(version, {"tags": tags, "run_id": version.run_id or ""})


def _describe_registration(name: str, run_id: str, tags: Mapping[str, str]) -> bytes:
    """Return the text that the signature of a registration is of."""
    signed = _select_signed_tags(tags)
    signed.pop(ADOPTED, None)
    values = {"registered": name, "run_id": run_id, "tags": signed}
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def _select_signed_tags(tags: Mapping[str, str]) -> dict[str, str]:
    return {
        key: value
        for key, value in tags.items()
        if key in SIGNED_TAGS or (key.startswith("ebbflow.") and key.endswith(SIGNED_SUFFIX))
    }


def _describe_promotion(version: ModelVersion) -> bytes:
    return _encode(version, {"promotion": version.tags.get(PROMOTION, "")})


def _encode(version: ModelVersion, values: Mapping[str, object]) -> bytes:
    # The name and the number of the version: a signature that is copied to another version does
    # not match there.
    named = {"model": version.name, "version": str(version.version), **values}
    return json.dumps(named, sort_keys=True, separators=(",", ":")).encode()


def _sign_text(key: Ed25519PrivateKey, text: bytes) -> str:
    signature = base64.b64encode(key.sign(text)).decode()
    return f"ed25519:{_identify(key.public_key())}:{signature}"


def _check_signature(
    version: ModelVersion,
    keys: Mapping[str, Ed25519PublicKey],
    tag: str,
    text: bytes,
    fix: str | None = None,
) -> str:
    """Check the signature in a tag, and return the id of its key."""
    named = f"{version.name!r} version {version.version}"
    fix = fix or (
        f"verify the version, and sign it with `ebbflow sign {version.name}/{version.version}`"
    )
    value = version.tags.get(tag)
    if not value:
        raise SignatureError(f"{named} has no signature (tag {tag}); {fix}")
    return _check_value(value, keys, text, named, f"the tag {tag} does not match its digests", fix)


def _check_value(
    value: str,
    keys: Mapping[str, Ed25519PublicKey],
    text: bytes,
    named: str,
    difference: str,
    fix: str = "sign it with one of these",
) -> str:
    """Check a signature against the text, and return the id of its key."""
    algorithm, _, rest = value.partition(":")
    key_id, _, signature = rest.partition(":")
    if algorithm != "ed25519" or key_id not in keys:
        known = ", ".join(keys) or "no key"
        raise SignatureError(
            f"{named} is signed with the key {key_id[:16]!r} ({algorithm[:16]}), and {VERIFY_KEYS}"
            f" has {known}; {fix}"
        )
    try:
        keys[key_id].verify(base64.b64decode(signature, validate=True), text)
    except (InvalidSignature, ValueError):
        raise SignatureError(
            f"{named} is not what was signed: {difference}; do not use it, and find out who changed"
            " it"
        ) from None
    return key_id


def _identify(key: Ed25519PublicKey) -> str:
    """Return the first 16 hex digits of the sha256 of a public key."""
    return hashlib.sha256(key.public_bytes(Encoding.Raw, PublicFormat.Raw)).hexdigest()[:16]


def _read_private_key() -> Ed25519PrivateKey | None:
    text = _read_variable(SIGNING_KEY)
    if text is None:
        return None
    try:
        key = load_pem_private_key(text.encode(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        # Not the text: it may be most of a private key.
        raise SignatureError(
            f"{SIGNING_KEY} is no private key in PEM ({type(error).__name__}); make one with"
            " `ebbflow make-key FOLDER`"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise SignatureError(
            f"{SIGNING_KEY} is no ed25519 key; make one with `ebbflow make-key FOLDER`"
        )
    return key


def _read_public_keys() -> dict[str, Ed25519PublicKey]:
    """Return the keys that may have signed, by their ids."""
    keys = {}
    text = _read_variable(VERIFY_KEYS)
    for block in PEM_BLOCK.findall(text or ""):
        try:
            key = load_pem_public_key(block.encode())
        except (ValueError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, Ed25519PublicKey):
            raise SignatureError(f"{VERIFY_KEYS} has a block that is no public ed25519 key")
        keys[_identify(key)] = key
    if text is not None and not keys:
        raise SignatureError(
            f"{VERIFY_KEYS} has no public key in PEM; give the file {PUBLIC_FILE} of `ebbflow"
            " make-key`"
        )
    # Who signs trusts its own key, so that a single variable is enough where versions are made.
    private = _read_private_key()
    if private is not None:
        keys[_identify(private.public_key())] = private.public_key()
    return keys


def _read_variable(name: str) -> str | None:
    """Return the PEM text of a variable that holds it, or the path of a file with it."""
    value = os.environ.get(name)
    if value is None:
        return None
    if not value.strip():
        raise SignatureError(f"{name} is set and empty; give it a key, or unset it")
    if "-----BEGIN" in value:
        return value
    try:
        return Path(value).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SignatureError(
            f"{name} names a file that cannot be read ({type(error).__name__}); give the path of a"
            " PEM file, or its text"
        ) from None
