"""What secrets look like: in URIs and connection strings, by the names of keys, and by the forms
that their issuers give them.

Secrets have no place in a recipe: it becomes parameters, a file in MLflow, a page of the report.
``ebbflow.recipe.base`` refuses them, and everything that quotes somebody else's text redacts it.
Every pattern takes linear time: none searches the same text from many places.

detect-secrets 1.5.0 with its default plugins was tried on ``tests/recipe/test_secret_forms.py``. It
misses 10 of 18 secrets in URIs and connection strings, 18 of 23 marked keys (of OpenAI, Anthropic,
Hugging Face and GitHub among them) and 25 of 36 names of keys, and it takes the commit of a
``revision`` for a secret. It scans source files and redacts no text. These patterns therefore stay.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any
from urllib.parse import unquote_plus

# After the colon of an authority; such a text is no password.
PORT = r"""\d+(?:[/?#\s'"),;]|$)"""
USER_AND_PASSWORD = re.compile(
    r"(?<![A-Za-z0-9+.-])([A-Za-z0-9+.-]+://)(?:"
    r"[^\s/?#@:]*:[^\s/?#]*@"
    r"|[^\s/?#:]{0,300}@[^\s/?#:]{0,300}:[^\s/?#@]*@"  # an e-mail address as user
    # a slash in the password that nobody encoded
    rf"|[^\s/?#@:\[]*:(?!{PORT})[^\s@]{{0,300}}@(?:[^\s/?#]*@)?"
    r")"
)
USER_WITHOUT_SCHEME = re.compile(r"(^|(?<=[\s='\"(]))(//)[^\s/?#@:]{1,300}:[^\s/?#@]{1,300}@")
"""``//user:password@host``, as urllib3 and SQLAlchemy also read it."""
USER_OF_THE_WEB = re.compile(r"(https?://)[^\s/?#]+@")
"""Without a password, what comes before the @ is a token."""
ORACLE = re.compile(r"(jdbc:oracle:\w{1,20}:)[^\s/@]{1,300}/[^\s@]{1,300}@")
PARAMETER = re.compile(r"([?&#])([\w.%-]{1,100})=([^&\s'\"]+)")
"""A parameter of a query or a fragment."""
URI = re.compile(r"(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s'\"<>]{1,10000}")
PUBLIC_PARAMETER = re.compile(
    r"allow_http|alt|anon|api-version|application_name|async_fallback|author|autocommit|bucket"
    r"|cache|cachedb|channel_binding|charset|check_same_thread|client_encoding|collation"
    r"|config|connect_timeout|connection_timeout|cursorclass|database|dataset|db|dbname"
    r"|dialect|download|driver|echo|encrypt|endpoint|endpoint_override|endpoint_url"
    r"|environment|etag|experiment|expires|filename|folder|format|generation|host|id|isolation"
    r"|isolation_level|keyword|lang|language|limit|local_infile|max_tokens|mode|model|name"
    r"|next|nolock|odbc_connect|offset|options|order|page|path|pool_recycle|pool_size"
    r"|poolclass|port|profile|project|q|query|raw|read_timeout|ref|region|requiressl"
    r"|response-content-(?:disposition|type)|retries|revision|role|schema|scheme|search"
    r"|search_path|seed|servertimezone|service|session_pool|sharedcache|sigma|size|sort|split"
    r"|ssl|ssl_ca|ssl_cert|ssl_check_hostname|ssl_key|ssl_verify_cert|sslca|sslcert|sslkey"
    r"|sslmode|sslrootcert|state|statement_timeout|status|subdirectory|tab|table"
    r"|target_session_attrs|tcp_user_timeout|timeout|timezone|tls|tokenizer|type|tz"
    r"|unix_socket|use_ssl|user|username|verify|version|versionid|view|warehouse|workflowtype"
    r"|write_timeout",
    re.IGNORECASE,
)
"""Parameters of a URI that hold no secret: of database drivers, stores of files, MLflow and pages
of the web. Any other one may, since services name the parameter of their key as they like.
"""
PARAMETER_NAME = re.compile(
    r"token(?!iz)|secret|passw|pwd|key(?!word)|signature|(?:^|[_.-])sig$|credential"
    r"|auth(?!ors?$)|(?:^|[_.-])pass$|^code$",
    re.IGNORECASE,
)
SETTING = re.compile(
    r"(?<![\w.%?&#-])([\w.%-]{1,100})=(\{[^{}]*\}|'[^']*'|\"[^\"]*\""
    r"|(?:(?!,[\w.%-]{1,100}=)[^\s;'\"])+)"
)
"""A setting of a connection string, between semicolons, commas or blanks."""
MAX_DECODED = 2
"""Times that a parameter is decoded. Nobody writes URIs inside URIs inside URIs."""
ENTRY = re.compile(r"""((["'])([\w.-]{1,100})\2\s{0,9}:\s{0,9})(["'])(?:\\.|(?!\4)[^\\])*\4""")
"""An entry of a mapping, as JSON and Python write it."""
AUTHORIZATION = re.compile(
    r"(authorization['\"]?\s{0,9}[:=]\s{0,9}['\"]?)(?:(?:basic|bearer|token)\s{1,9})?[^\s'\",;]+",
    re.IGNORECASE,
)
ISSUED = re.compile(
    r"(?<![A-Za-z0-9_-])(?:"
    # OpenAI, Anthropic, OpenRouter, Langfuse
    r"sk-(?:ant|proj|svcacct|admin|or|lf)-[\w-]{16,}|sk-[A-Za-z0-9]{20,}"
    r"|[prs]k_(?:live|test)_[A-Za-z0-9]{10,}"  # Stripe
    r"|gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|hf_[A-Za-z0-9]{20,}|r8_[A-Za-z0-9]{30,}|nvapi-[\w-]{20,}|gsk_[A-Za-z0-9]{20,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])|AIza[\w-]{35}|ya29\.[\w-]{20,}"  # AWS, Google
    r"|xox[abeoprs]-[\w-]{10,}|xapp-[\w-]{20,}|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,}"
    r"|dapi[0-9a-f]{32}|SG\.[\w-]{16,}\.[\w-]{16,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # a JSON web token
    r"|(?i:bearer)\s(?=[^\s\d]{0,200}\d)[\w.~+/-]{16,}=*"
    r")"
)
"""Keys and tokens whose issuers mark them."""
PRIVATE_KEY = re.compile(
    r"-----BEGIN ([A-Z0-9 ]{0,40})PRIVATE KEY(?: BLOCK)?-----(?:(?!-----END )[\s\S])*(?:-----END"
    r" [A-Z0-9 ]{0,60}-----)?"
)

OPTION = re.compile(
    r"(?:^|_)(?:secrets?|passw(?:or)?ds?|passphrases?|passcodes?|pwds?|credentials?"
    r"|authorization|bearer|cookies?|creds?|dsns?|jwts?|otps?|pats?|(?:http_?)?auth"
    r"|(?:access|api|auth|bearer|id|refresh|session)?tokens?|(?:basic|http|proxy)_auth"
    r"|conn(?:ection)?_?str(?:ing)?s?"
    r"|(?:access|account|admin|api|auth|client|encryption|license|master|private|sas"
    r"|secret|service|shared|signing|ssh|storage"
    r"|subscription|anthropic|aws|azure|cohere|gcp|gemini|github|gitlab|google|groq|hf"
    r"|hugging_?face|mistral|mlflow|nvidia|openai"
    r"|openrouter|replicate|together|wandb)_?keys?"
    r"|(?:admin|db|database|http|login|proxy|root|smtp|user)_?pass)$|^pass$"
)
"""Names of somebody's own options that are secrets, in snake case and without a number at their
end.
"""
INSIDE = re.compile(
    r"(?:^|_)(?:secrets?|passw(?:or)?ds?|passphrases?|pwds?|credentials?|(?:api|access|auth)_?keys?"
    r"|(?:access|auth|bearer|refresh)_tokens?)(?:_|$)"
)
"""Names of secrets with more words behind them, such as ``db_password_prod``."""
POINTER = re.compile(
    r"_(?:file|files|folder|path|dir|env|name|names|id|ids|var|vars|variable|variables|uri|url"
    r"|length|len|count|field|column|policy|mode|type|header|prefix|required|manager|store|hash)$"
)
"""Endings of names that tell where a secret is, or about it."""
PASSWORD = re.compile(r"(?:^|_)(?:secret|passw(?:or)?d|passphrase|passcode|pwd)$")
"""Names of options whose value is a secret even if it is a number. Under other names, such as
``max_tokens``, a number counts something."""
OF_WORDS = re.compile(
    r"(?:^|_)(?:additional|answer|bos|class|cls|completion|end|eos|ignore|image|input"
    r"|mask|max|min|negative|new|num|output|pad|positive"
    r"|prompt|sep|special|start|stop|text|total|trigger|unk|video)_tokens?$"
)
"""Names of options about the tokens that a language model reads, which are no secrets."""
RUN = re.compile(r"[A-Za-z0-9]{20,}")
"""Names of models and files have separators: none shipped with diffusers or listed in the docs has
so long a run of letters and digits."""
KINDS = (re.compile("[a-z]"), re.compile("[A-Z]"), re.compile("[0-9]"))
HEXADECIMAL = re.compile("[0-9a-fA-F]+")
PIN = re.compile(
    r"(?:(?<=[/@])|(?<=sha256:))(?:[0-9a-f]{64}|[0-9a-f]{40})(?![A-Za-z0-9])"
    r"|(?<=runs:/)[0-9a-f]{32}(?![A-Za-z0-9])|(?<=/)[0-9a-f]{32}(?=/artifacts)"
)
"""Commits in paths and addresses, digests of images, and runs of MLflow, which are public."""
MIN_ENTROPY = 3.5
"""Bits per character of a run of 20 and more, whose highest value is log2(20) = 4.3. Random ones of
62 characters have 4.1 in the mean, and less than 3.5 in one of 10,000."""
DIGEST = re.compile(
    r"(?:^|_)(?:revision|commit|sha|digest|hash|checksum|etag|md|fingerprint|git)(?:_|$)"
)
"""Names of options whose value is random and public. Numbers at the end are cut (``sha256``)."""
HEADERS = re.compile(r"(?:^|_)headers?$")
HARMLESS_HEADERS = (
    "accept",
    "accept_encoding",
    "accept_language",
    "cache_control",
    "connection",
    "content_type",
    "user_agent",
)


def redact_secrets(text: str) -> str:
    """Return a text with ``***`` in place of passwords, tokens and keys, as far as their form or
    what stands before them gives them away.

    Example:
        >>> redact_secrets("postgresql://ada:secret@db/mlflow")
        "postgresql://***@db/mlflow"
    """
    return _redact_patterns(text, decode=True)


def is_secret_option(path: tuple[Any, ...], value: Any) -> bool:
    """Return whether the names along the path of an option, from ``options`` on, or its value say
    that it is a secret.
    """
    names = [_to_snake_case(str(key)) for key in path]
    if isinstance(value, str) and value:
        if _looks_random(value) and not any(map(DIGEST.search, names)):
            return True
        return any(map(is_secret_name, names)) or _is_secret_header(names, value)
    return type(value) in (int, float) and bool(PASSWORD.search(names[-1]))


def is_secret_name(name: str) -> bool:
    """Return whether a value of this name is a secret, such as ``api_key``, ``accessToken`` or
    ``password2``.
    """
    name = _to_snake_case(name)
    is_secret = OPTION.search(name) or (INSIDE.search(name) and not POINTER.search(name))
    return bool(is_secret) and not OF_WORDS.search(name)


def _looks_random(text: str) -> bool:
    """Return whether a text holds a run of letters and digits as a key has it: 20 characters of all
    three kinds that follow no pattern, or 32 hexadecimal digits.
    """
    for run in RUN.findall(PIN.sub("", text)):
        if HEXADECIMAL.fullmatch(run):
            # A number, or one digit again and again, is no key.
            if len(run) >= 32 and not run.isdigit() and len(set(run.lower())) >= 8:
                return True
        elif all(kind.search(run) for kind in KINDS) and not _consists_of_words(run):
            counts = Counter(run).values()
            entropy = -sum(count / len(run) * math.log2(count / len(run)) for count in counts)
            if entropy >= MIN_ENTROPY:
                return True
    return False


def _consists_of_words(run: str) -> bool:
    """Return whether most letters are in small ones in a row, as in the name of a class."""
    return sum(map(len, re.findall("[a-z]{4,}", run))) > len(run) / 2


def _redact_patterns(text: str, decode: bool) -> str:
    """Redact each kind of secret in turn.

    Args:
        decode: look for secrets inside percent-encoded parameters, too. It is False within them,
            so that decoding ends.
    """
    # URIs first: a password in one may look like a parameter or a setting.
    for uri in (USER_AND_PASSWORD, USER_OF_THE_WEB, ORACLE):
        text = uri.sub(r"\1***@", text)
    text = USER_WITHOUT_SCHEME.sub(r"\2***@", text)
    text = URI.sub(lambda match: PARAMETER.sub(_redact_unknown_parameter, match[0]), text)
    text = PARAMETER.sub(
        lambda match: _redact_value(match, _is_secret_parameter(match[2], match[3], decode)), text
    )
    text = SETTING.sub(
        lambda match: _redact_value(match, _is_secret_setting(match[1], match[2])), text
    )
    text = ENTRY.sub(
        lambda match: (
            f"{match[1]}{match[4]}***{match[4]}" if is_secret_name(match[3]) else match[0]
        ),
        text,
    )
    text = AUTHORIZATION.sub(r"\1***", text)
    return PRIVATE_KEY.sub("***", ISSUED.sub("***", text))


def _redact_value(match: re.Match[str], is_secret: bool) -> str:
    return f"{match[0].partition('=')[0]}=***" if is_secret else match[0]


def _redact_unknown_parameter(match: re.Match[str]) -> str:
    is_public = PUBLIC_PARAMETER.fullmatch(unquote_plus(match[2]))
    # Of three characters or a word for yes and no, nothing can be guessed or used.
    is_harmless = len(match[3]) <= 3 or match[3].lower() in ("true", "false", "none", "null")
    return _redact_value(match, not is_public and not is_harmless)


def _is_secret_parameter(name: str, value: str, decode: bool) -> bool:
    name = unquote_plus(name)
    if PARAMETER_NAME.search(name) and not re.match(
        r"ssl_?(?:key|cert)|(?:max|min|num|new)_?tokens", name, re.IGNORECASE
    ):
        return True
    if not decode:
        return False
    # The value may be a whole URI with a password in it, percent-encoded once or twice.
    for _ in range(MAX_DECODED):
        encoded = value
        value = unquote_plus(value)
        if value != encoded and _redact_patterns(value, decode=False) != value:
            return True
    return False


def _is_secret_setting(name: str, value: str) -> bool:
    # ``max_tokens=100`` counts something; ``password=1234`` is a secret.
    counts = value.isdigit() and not PASSWORD.search(_to_snake_case(name))
    return is_secret_name(name) and not counts


def _is_secret_header(names: list[str], value: str) -> bool:
    """Return whether a value is an HTTP header that may hold a secret."""
    # ``names`` are the keys down to the value, such as ``headers`` and ``X-Api-Key``.
    if not any(map(HEADERS.search, names)):
        return False
    # ``headers: {X-Api-Key: ...}`` has the header's name as a key, ``headers: ["X-Api-Key: ..."]``
    # in the text.
    # A number is the place in a list of headers.
    if HEADERS.search(names[-1]) or names[-1].isdigit():
        header = _to_snake_case(value.partition(":")[0])
    else:
        header = names[-1]
    # Every service has a header of its own for its key, so only the usual ones are harmless.
    return header not in HARMLESS_HEADERS


def _to_snake_case(name: str) -> str:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return (
        re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_").rstrip("0123456789").rstrip("_")
        or name
    )
