"""What is taken for a secret, and what is not: nothing honest is mangled or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from ebbflow.recipe import Recipe, RecipeError, load_recipe
from ebbflow.recipe.base import iter_leaves, require_no_secrets
from ebbflow.recipe.secrets import is_secret_name, is_secret_option, redact_secrets
from tasks.deployment import DeploymentError, read_deployment
from tests.cpu_time import at_most_cpu_seconds

ROOT = Path(__file__).parents[2]
LETTERS = "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1eF3hJ5"
"""As random as keys are; in no pattern by itself."""

IN_URIS = {
    "password": "http://user:SECRET@host:5000",
    "user after a digit": "1https://user:SECRET@host",
    "odbc_connect": (
        "mssql+pyodbc:///?odbc_connect=DRIVER%3D%7BODBC+Driver%7D%3BUID%3Du%3BPWD%3DSECRET"
    ),
    "odbc_connect, plain": (
        "mssql+pyodbc:///?odbc_connect=Driver={ODBC Driver 17};Server=h;UID=u;PWD=SECRET"
    ),
    "odbc_connect, encoded twice": "mssql+pyodbc:///?odbc_connect=UID%253Du%253BPWD%253DSECRET",
    "ODBC": "Driver={ODBC Driver 17};Server=h;Uid=u;Pwd={SECRET;x}",
    "jdbc of SQL Server": (
        "jdbc:sqlserver://host:1433;databaseName=d;user=u;password=SECRET;encrypt=true"
    ),
    "jdbc of Oracle": "jdbc:oracle:thin:scott/SECRET@//host:1521/service",
    "jdbc of PostgreSQL": "jdbc:postgresql://host/db?user=u&password=SECRET",
    "jdbc of MySQL": "jdbc:mysql://(host=h,port=1,user=u,password=SECRET)/db",
    "libpq": "host=h dbname=d user=u password='SECRET'",
    "Azure storage": (
        "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=SECRET==;EndpointSuffix=core.windows.net"
    ),
    "pass": "http://host/mlflow?user=u&pass=SECRET",
    "fragment": "https://host/callback#access_token=SECRET&token_type=bearer",
    "code": "https://host/callback?code=SECRET&state=x",
    "sig": "https://a.blob.core.windows.net/c?sv=2024&sig=SECRET",
    "a redirect": "https://host/?next=https%3A%2F%2Fu%3ASECRET%40host",
    "an encoded name": "https://host/?api%5Fkey=SECRET",
    "jwt": "https://host/scores?jwt=SECRET",
    "sas": "https://a.blob.core.windows.net/c?sas=SECRET",
    "a name that only the service knows": "https://host/scores?x=1&tk=SECRET",
    "without a scheme": "//user:SECRET@host/path",
}


@pytest.mark.parametrize("text", IN_URIS.values(), ids=IN_URIS)
def test_secrets_in_uris_and_connection_strings(text):
    shown = redact_secrets(f"cannot reach {text} now")
    assert "SECRET" not in shown
    assert "***" in shown
    for recipe in (
        {"tracking": {"uri": text}},
        {"rewards": [{"name": "a.b:C", "options": {"where": [text]}}]},
    ):
        with pytest.raises(RecipeError, match="holds a password, a token or a key") as error:
            Recipe.model_validate(recipe)
        assert "SECRET" not in str(error.value)


PEM = f"-----BEGIN RSA PRIVATE KEY-----\n{LETTERS}\n{LETTERS}\n-----END RSA PRIVATE KEY-----"
ISSUED = {
    "OpenAI": f"sk-{LETTERS}",
    "an OpenAI project": f"sk-proj-{LETTERS}_x-y",
    "Anthropic": f"sk-ant-api03-{LETTERS}-_AA",
    "GitHub": f"ghp_{LETTERS}",
    "a GitHub app": f"ghs_{LETTERS}",
    "GitHub, fine-grained": f"github_pat_{LETTERS}_{LETTERS}",
    "GitLab": f"glpat-{LETTERS[:20]}",
    "Hugging Face": f"hf_{LETTERS[:34]}",
    "AWS": "AKIA" + "ABCDEFGHIJKLMNOP",
    "AWS, for a session": "ASIA" + "ABCDEFGHIJKLMNOP",
    "Google": f"AIza{LETTERS[:35]}",
    "Slack": f"xoxb-1234567890-{LETTERS[:24]}",
    "Stripe": f"sk_live_{LETTERS[:24]}",
    "Replicate": f"r8_{LETTERS}",
    "a JSON web token": f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.{LETTERS}",
    "a private key": PEM,
    "a private key without its end": PEM[:80],
    "OpenSSH": PEM.replace("RSA", "OPENSSH"),
    "PGP": PEM.replace("RSA PRIVATE KEY", "PGP PRIVATE KEY BLOCK"),
    "a bearer": f"Bearer {LETTERS}",
    "a header": f"Authorization: Basic {LETTERS}",
    "a mapping of Python": f"{{'user': 'u', 'api_key': '{LETTERS}'}}",
    "a mapping of JSON": json.dumps({"clientSecret": f'{LETTERS}"x'}),
}


@pytest.mark.parametrize("secret", ISSUED.values(), ids=ISSUED)
def test_texts_that_look_like_secrets_wherever_they_are(secret):
    shown = redact_secrets(f"refused ({secret}); ask again")
    assert LETTERS[:16] not in shown
    assert "ABCDEFGHIJKLMNOP" not in shown
    assert shown.startswith("refused (")
    wrong = [
        {"prompts": {"source": secret}},
        {"output": f"runs/{secret}"},
        {
            "rewards": [
                {
                    "name": "vision_judge",
                    "url": "http://127.0.0.1:1",
                    "model": "m",
                    "question": f"Is it {secret}?",
                }
            ]
        },
        {"rewards": [{"name": "a.b:C", "options": {"x": {"y": [secret]}}}]},
        {"rewards": [{"name": "a.b:C", "options": {secret: 1}}]},
        {secret: 1},
        {"policy": {secret: {"x": 1}}},
        {"stages": [{"kind": secret}]},
    ]
    for recipe in wrong:
        with pytest.raises(RecipeError) as error:
            Recipe.model_validate(recipe)
        assert LETTERS[:16] not in str(error.value)
        assert "ABCDEFGHIJKLMNOP" not in str(error.value)


SECRET_NAMES = [
    *(
        "authorization",
        "Authorization",
        "connection_string",
        "connectionString",
        "conn_str",
        "dsn",
        "sentry_dsn",
        "tokens",
        "token",
    ),
    *(
        "api_keys",
        "apiKey",
        "API-KEY",
        "openai_key",
        "anthropicKey",
        "OPENAI_API_KEY",
        "password2",
        "password_1",
        "db_pass",
        "pass",
    ),
    *(
        "passphrase",
        "client_secret",
        "secrets",
        "HFToken",
        "hf_token",
        "session_token",
        "authToken",
        "cookie",
        "aws_secret_access_key",
    ),
    *(
        "credentials",
        "auth",
        "pat",
        "github_pat",
        "creds",
        "db_password_prod",
        "password_for_db",
        "api_key_prod",
        "private_key",
        "signing_key",
        "account_key",
        "x-api-key",
        "basic_auth",
        "jwt",
        "bearer",
    ),
]
HONEST_NAMES = [
    *(
        "tokenizer",
        "max_tokens",
        "keys",
        "key",
        "token_variable",
        "eos_token",
        "stop_tokens",
        "special_tokens",
        "trigger_token",
    ),
    *(
        "secret_name",
        "token_path",
        "sort_key",
        "prompt_key",
        "image_key",
        "cache_key",
        "keyword",
        "passes",
        "first_pass",
        "compass",
    ),
    *(
        "author",
        "auth_mode",
        "signature",
        "sigma",
        "code",
        "header_size",
        "connection",
        "authorized",
        "tokenization",
        "password_variable",
        "password_file",
        "api_key_env",
        "pattern",
        "spatial",
        "author_id",
    ),
]


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_options_that_are_secrets_by_their_names(name):
    assert is_secret_name(name)
    for options in (
        {name: "SECRET"},
        {"client": {name: "SECRET"}},
        {name: ["SECRET"]},
        {name: {"value": "SECRET"}},
    ):
        with pytest.raises(RecipeError, match="is a secret, by its name or by how random") as error:
            Recipe.model_validate({"rewards": [{"name": "a.b:C", "options": options}]})
        assert "SECRET" not in str(error.value)


@pytest.mark.parametrize("name", HONEST_NAMES)
def test_options_that_only_sound_like_secrets(name):
    assert not is_secret_name(name)
    Recipe.model_validate({"rewards": [{"name": "a.b:C", "options": {name: "x"}}]})


@pytest.mark.parametrize(
    ("path", "value", "secret"),
    [
        (("password",), 1234, True),
        (("tokens",), 1234, False),
        (("token",), True, False),
        (("token",), "", False),
        (("token",), None, False),
        (("headers", "X-Team"), "SECRET", True),
        (("http_headers", "Cookie"), "SECRET", True),
        (("headers", "Content-Type"), "application/json", False),
        (("headers", 0), "X-Team: SECRET", True),
        (("headers", 0), "Accept: text/html", False),
        (("headers",), "X-Team: SECRET", True),
        (("x",), LETTERS, True),
        (("x",), f"key={LETTERS[:20]}", True),
        (("x",), "0123456789abcdef0123456789abcdef", True),
        (("revision",), "3de623fc3c33e44ffbe2bad470d0f45bccf2eb21", False),
        (("weights", "sha256"), "0123456789abcdef" * 4, False),
        (("x",), f"/hub/models--a--b/snapshots/{'0123456789' * 4}/model.safetensors", False),
        (("x",), f"hf://datasets/a/b@{'89abcdef01' * 4}/x.parquet", False),
        (("x",), f"https://huggingface.co/a/b/resolve/{'89abcdef01' * 4}/x.parquet", False),
        (("x",), f"registry/image@sha256:{'89abcdef' * 8}", False),
        (("x",), "runs:/0123456789abcdef0123456789abcdef/policy", False),
        (("x",), "s3://bucket/1/0123456789abcdef0123456789abcdef/artifacts/policy", False),
        (("x",), "https://host/hooks/0123456789abcdef0123456789abcdef", True),
        (("x",), f"key:{'89abcdef01' * 4}", True),
        (("x",), "laion/CLIP-ViT-H-14-laion2B-s32B-b79K", False),
        (("x",), "sac+logos+ava1-l14-linearMSE.pth", False),
        (("x",), "mask2former-swin-small-coco-instance", False),
        (("x",), "StableDiffusionXLControlNetImg2ImgPipeline", False),
        (("x",), "A" * 20 + "a1", False),
        (("x",), "1" * 40, False),
    ],
)
def test_option_with_a_secret_value_is_recognised(path, value, secret):
    assert is_secret_option(path, value) == secret


@pytest.mark.parametrize(
    "uri", ["http://user:SE\nCRET@host:5000", "http://user:x\nSECRET@host", "//user:x\r\nSECRET@h"]
)
def test_a_password_with_a_newline_is_not_repeated(uri):
    for recipe in (
        {"tracking": {"uri": uri}},
        {"output": uri},
        {"prompts": {"source": uri}},
        {"rewards": [{"name": "remote", "url": uri}]},
        {"rewards": [{"name": "a.b:C", "options": {"where": uri}}]},
    ):
        with pytest.raises(RecipeError) as error:
            Recipe.model_validate(recipe)
        assert "CRET" not in str(error.value)


@pytest.mark.parametrize("key", ["api", "headres", "llm", "x", "Password", "auth"])
@pytest.mark.parametrize("value", ["hunter2", 31337, ["hunter2"], {"a": "hunter2"}])
def test_the_value_of_an_unknown_key_is_never_repeated(key, value):
    for recipe in (
        {key: value},
        {"tracking": {key: value}},
        {"rewards": [{"name": "remote", "url": "http://127.0.0.1:1", key: value}]},
        {"stages": [{"kind": "offline", "algorithm": {"name": "diffusion_nft", key: value}}]},
    ):
        with pytest.raises(RecipeError, match=f"{key}: unknown key") as error:
            Recipe.model_validate(recipe)
        assert "hunter2" not in str(error.value)
        assert "31337" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "password: hunter2: x",
        "a: [\napi: 'hunter2",
        "password: !!int hunter2",
        "x: hunter2\n\ty: 1",
        "x: &a hunter2\ny: *b",
    ],
)
def test_a_broken_line_is_not_quoted(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match="not valid YAML") as error:
        load_recipe(path)
    assert "hunter2" not in str(error.value)
    for given in (str(path), "{" + text):
        with pytest.raises(DeploymentError, match="not valid YAML") as refused:
            read_deployment({"EBBFLOW_DEPLOYMENT": given})
        assert "hunter2" not in str(refused.value)


def test_a_deployment_of_a_pod_is_not_quoted():
    with pytest.raises(DeploymentError, match="light.api: unknown key") as error:
        read_deployment({"EBBFLOW_DEPLOYMENT": '{"light": {"api": "hunter2"}}'})
    assert "hunter2" not in str(error.value)


HONEST = [
    "runs",
    "s3://bucket/runs/a@b",
    "/data/prompts/keys.jsonl",
    "C:/models/sd3",
    "black-forest-labs/FLUX.1-dev",
    "hf-internal-testing/tiny-sd3-pipe",
    "hf_hub/models--a--b",
    "sk-learn-contrib/metric-learning-with-estimators",
    "sk-image",
    "ghp_short",
    'Is the text "{target}" in this image, spelled exactly so? Answer yes or no.',
    'Does the poster say "PASSWORD: 1234"? key=1',
    "A basic understanding of secret gardens; the bearer of tokens",
    "What is the code?code word",
    'a sign "token"',
    "Rate it from 0 to 5: a=1, b=2; c={x}",
    "tokens=512 max_tokens=77 seed=3",
    "https://host/p.txt?versionId=3&tokenizer=t&sigma=1&author=me&keyword=x&max_tokens=3",
    "https://host/page#section-2",
    "postgresql://host/db?sslmode=require&channel_binding=require&statement_timeout=30000",
    "https://storage.googleapis.com/download/storage/v1/b/bucket/o/p.txt?alt=media",
    "https://datasets-server.huggingface.co/rows?dataset=a%2Fb&config=default&split=train",
    "jdbc:mysql://host/db?serverTimezone=Europe/Berlin&useSSL=false",
    "mssql+pyodbc:///?odbc_connect=DRIVER%3D%7BODBC%7D%3BTrusted_Connection%3Dyes",
    "jdbc:sqlite:/tmp/x.db",
    "jdbc:oracle:thin:@//host:1521/service",
    "sqlite:////tmp/a:b@c.db",
    "postgresql://mlflow@host:5432/db?application_name=a@b",
    "eyJ is how base64 of JSON begins",
    "-----BEGIN CERTIFICATE-----",
    "ebbflow_plugins.rewards:Authorization",
]


@pytest.mark.parametrize("text", HONEST)
def test_nothing_honest_is_mangled(text):
    assert redact_secrets(text) == text
    Recipe.model_validate({"rewards": [{"name": "a.b:C", "options": {"x": text, "y": {text: 1}}}]})


def written() -> list[Path]:
    return sorted(
        [
            *ROOT.glob("workflows/recipes/*.yaml"),
            *ROOT.glob("examples/**/*.yaml"),
            *ROOT.glob("benchmarks/**/*.yaml"),
        ]
    )


@pytest.mark.parametrize("path", written(), ids=lambda path: path.stem)
def test_no_text_of_a_shipped_recipe_is_mangled(path):
    leaves = iter_leaves(yaml.safe_load(path.read_text()))
    assert [
        value for _, value in leaves if isinstance(value, str) and redact_secrets(value) != value
    ] == []
    require_no_secrets(leaves)


@pytest.mark.parametrize(
    "path",
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("datasets/**/*.txt")],
    ids=lambda path: path.name,
)
def test_prose_and_prompts_keep_their_lines(path):
    lines = path.read_text().splitlines()
    changed = [line for line in lines if redact_secrets(line) != line]
    assert all("TOKEN" in line or "KEY" in line for line in changed), changed


REPEATED = [
    "a",
    "a://",
    "@",
    "x://@",
    "x://a:",
    "?a=",
    "&token=",
    "{",
    "a={",
    "'a':'",
    '"',
    "password=",
    "a,b=",
    "-----BEGIN PRIVATE KEY-----",
]


@pytest.mark.parametrize(
    "part",
    [
        *REPEATED,
        "eyJabcdefgh.",
        "sk-",
        "Bearer ",
        "?a=%25",
        "http://",
        "Authorization: ",
        "jdbc:oracle:a:b",
    ],
)
def test_redaction_takes_linear_time(part):
    with at_most_cpu_seconds(60):
        redact_secrets(part * (2**18 // len(part)))
        redact_secrets("x://" + part * (2**18 // len(part)))
