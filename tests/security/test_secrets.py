"""Secrets stay in the environment: no file, log, error or script holds them."""

import html
import json
import logging
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
from tiers import nightly

from llama_core import redaction
from llama_core.chain.preview import preview_script
from llama_core.config.run import RunConfig
from llama_core.data.files import remote
from llama_core.errors import ConfigError, DataError, TrainingFailedError
from llama_core.launch.outcome import record_outcome
from llama_core.log_lines import LineFormatter
from llama_core.machine.hazards import _prefect
from llama_core.records.directory import RunDirectory
from llama_core.redaction import redacted, redacted_values

SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_abcDEF123456",
    "PREFECT_API_KEY": "pnu_abcDEF1234567",
    "MY_DB_PASSWORD": "hunter2hunter2",
}
DATABASE = "postgresql+asyncpg://prefect:s3cret@db:5432/prefect"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


def holds_secret(text):
    return any(secret in text for secret in (*SECRETS.values(), "s3cret"))


ALL = f"{' '.join(SECRETS.values())} {DATABASE} export HF_TOKEN=s3cret"


def test_records_errors_and_logs_of_a_failure_hold_no_secret(tmp_path):
    run = RunDirectory(tmp_path)
    run.create()
    record_outcome(run, "crashed", reason=ALL, next_action=ALL)
    assert json.loads(run.outcome.read_text())["status"] == "crashed"
    logged = LineFormatter().format(logging.LogRecord("x", logging.ERROR, "x", 1, "%s", (ALL,), None))
    errors = [str(TrainingFailedError(ALL)), *ConfigError(ALL, ALL).problems]
    assert not any(map(holds_secret, (run.outcome.read_text(), logged, *errors)))


@pytest.mark.parametrize(
    "name",
    [
        *("GITHUB_PAT", "MYSQL_PASS", "DB_PWD", "GIT_CREDENTIALS", "PREFECT_API_AUTH_STRING", "KEY_PASSPHRASE"),
        *("SSH_PRIVATE_KEY", "OPENAI_APIKEY", "AWS_SECRET_ACCESS_KEY", "GIT_CREDENTIAL"),
        *("STRIPE_KEY", "AZURE_STORAGE_KEY", "AZURE_STORAGE_CONNECTION_STRING", "SSHPASS", "DBPASS", "PGPWD"),
    ],
)
def test_the_values_of_variables_whose_name_says_secret_are_hidden(name, monkeypatch):
    assert redacted(f"export {name}=s3cret") == f"export {name}=***"
    monkeypatch.setenv(name, "a-long-value-1")
    assert redacted("it says a-long-value-1") == "it says ***"


@pytest.mark.parametrize("name", ["HF_TOKEN_READ", "OPENAI_API_KEY_1", "DB_PASSWORD_OF_PROD", "MY_SECRET_B"])
def test_a_name_may_say_after_the_kind_of_a_secret_which_it_is(name, monkeypatch):
    assert redacted(f"export {name}='abcDEF123'") == f"export {name}='***'"
    monkeypatch.setenv(name, "a-long-value-1")
    assert redacted("it says a-long-value-1") == "it says ***"


@pytest.mark.parametrize("name", ["HF_TOKEN_PATH", "GIT_CREDENTIAL_HELPER", "API_KEY_FILE", "TOKEN_TTL_SECONDS"])
def test_a_name_that_says_where_a_secret_is_holds_none(name, monkeypatch):
    monkeypatch.setenv(name, "/home/me/a-long-path/1")
    assert redacted(f"{name}=/home/me/a-long-path/1") == f"{name}=/home/me/a-long-path/1"


def test_a_secret_of_the_environment_is_hidden_in_every_spelling(monkeypatch):
    secret = 'a/b+c "d" <é>12345678'
    monkeypatch.setenv("DB_PASSWORD", secret)
    spelt = [secret, quote(secret), quote(secret, safe=""), quote_plus(secret), json.dumps(secret), html.escape(secret)]
    for text in spelt:
        assert "12345678" not in redacted(f"it says {text}.")


def test_a_secret_that_begins_with_another_is_hidden_whole(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "abcDEF123456")
    monkeypatch.setenv("B_TOKEN", "abcDEF123456-and-more")
    assert redacted("it says abcDEF123456-and-more") == "it says ***"


@pytest.mark.parametrize("length", [300, 5000])
def test_a_long_token_in_an_address_is_hidden(length):
    token = "eyJ" * length
    assert redacted(f"git clone https://me:{token}@host/a") == "git clone https://me:***@host/a"
    assert redacted(f"git clone https://{token}@host/a") == "git clone https://***@host/a"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("git clone https://ghp_abc123@github.com/a/b", "git clone https://***@github.com/a/b"),
        ("https://x-access-token:ghp_abc@github.com", "https://x-access-token:***@github.com"),
        ("postgresql://me:a/b@c:d?e#f@db:5432/prefect", "postgresql://me:***@db:5432/prefect"),
        ("postgresql://me@example.org:pass@db/prefect", "postgresql://me@example.org:***@db/prefect"),
        ("redis://:hunter2@cache:6379/0", "redis://:***@cache:6379/0"),
        ("Authorization: Bearer eyJhbGciOi.abc-1_x=", "Authorization: Bearer ***"),
        ("{'Authorization': 'Basic YWRtaW46c2VjcmV0'}", "{'Authorization': 'Basic ***'}"),
        ('{"authorization": "token abcdef"}', '{"authorization": "token ***"}'),
        ("curl -H 'authorization: bearer abc'", "curl -H 'authorization: bearer ***'"),
        ("used Bearer abcdef0123456789abcdef for it", "used Bearer *** for it"),
        (
            "GET https://b.s3.aws/k?X-Amz-Credential=AKIA%2F1&X-Amz-Date=2&X-Amz-Signature=0a1b",
            "GET https://b.s3.aws/k?X-Amz-Credential=***&X-Amz-Date=2&X-Amz-Signature=***",
        ),
        ("url='https://a.blob/c/d?sv=2&se=3&sig=a%2Bb='", "url='https://a.blob/c/d?sv=2&se=3&sig=***'"),
        ("https://h/x?GoogleAccessId=me&Signature=a+b/", "https://h/x?GoogleAccessId=***&Signature=***"),
        (
            "https://h/x?Policy=a&amp;Signature=b&amp;Key-Pair-Id=c",
            "https://h/x?Policy=***&amp;Signature=***&amp;Key-Pair-Id=c",
        ),
        ("AccountName=a;AccountKey=bc==;EndpointSuffix=d", "AccountName=a;AccountKey=***;EndpointSuffix=d"),
        ("host=db user=me password=hunter2 dbname=x", "host=db user=me password=*** dbname=x"),
        ('{"password": "hunter\\"2", "a": "b"}', '{"password": "***", "a": "b"}'),
        ("{'db_password': 'it', 'client-secret': \"a'b\"}", "{'db_password': '***', 'client-secret': \"***\"}"),
        (r'"{\"apiKey\": \"a b\", \"c\": \"d\"}"', r'"{\"apiKey\": \"***\", \"c\": \"d\"}"'),
        ('{"access_token":"a", "token_type":"b"}', '{"access_token":"***", "token_type":"b"}'),
        ("curl -H 'x-api-key: abc' -H 'X-Goog-Api-Key:def'", "curl -H 'x-api-key: ***' -H 'X-Goog-Api-Key:***'"),
        ("{'api-key': 'abc1', 'PRIVATE-TOKEN': 'glpat-1'}", "{'api-key': '***', 'PRIVATE-TOKEN': '***'}"),
        ("https://app/x#access_token=abc&state=1", "https://app/x#access_token=***&state=1"),
        ("access_token=abc&client_secret=d&id_token=e", "access_token=***&client_secret=***&id_token=***"),
        ("two: http://a:b@c and http://d:e@f", "two: http://a:***@c and http://d:***@f"),
    ],
)
def test_passwords_and_tokens_in_addresses_and_headers_are_hidden(text, shown):
    assert redacted(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "training.steps=40, num_tokens=12, https://host:4200/api, a@b.c, HF_TOKEN=$HF_TOKEN, MAX_TOKENS=3",
        "http://127.0.0.1:4200/runs?of=me@example.org, ssh://git@github.com/a/b, postgresql://me@db/prefect",
        "PWD=/home/me, OLDPWD=/tmp, PASS=3, a Bearer of news, Basic understanding, http://host/a@b",
        "pad_token='<pad>', {'eos_token': '<eos>', \"token\": \"a\"}, an api-key: set one, TOKEN_BATCH=8192",
        "the authorization of a user, COMPASS=north, EPAT=1, KEY=1, a question? key=1 & more, num_tokens=3&steps=4",
    ],
)
def test_ordinary_text_is_not_redacted(monkeypatch, text):
    monkeypatch.setenv("SHORT_TOKEN", "training")
    assert redacted(text) == text


def test_the_address_of_a_server_is_shown_without_its_password(monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://me:s3cret@127.0.0.1:1/api")
    assert not holds_secret(str(_prefect()))


def test_a_job_script_holds_no_secret_and_a_setup_line_may_not():
    config = RunConfig.from_mapping({"launch": {"launcher": "slurm", "device": "cpu"}})
    assert not holds_secret(preview_script(config))
    for setup in ("export HF_TOKEN=hf_literal", "WANDB_API_KEY='s3cret' true"):
        with pytest.raises(ConfigError, match="should hold no secret") as refused:
            RunConfig.from_mapping({"launch": {"slurm": {"setup": [setup]}}})
        assert "hf_literal" not in str(refused.value) and not holds_secret(str(refused.value))
    RunConfig.from_mapping({"launch": {"slurm": {"setup": ["export HF_TOKEN=$(cat ~/.hf)", "source ~/.secrets"]}}})


@pytest.mark.wide
def test_a_run_writes_no_secret_to_its_directory(tmp_path):
    flags = "--device cpu --steps 1 --seq-len 32 --batch-size 1 --wandb offline"
    sizes = "--set architecture.num_layers=1 --set architecture.hidden_size=64"
    command = [sys.executable, "-m", "training_infra.cli", "train", *flags.split(), *sizes.split()]
    done = subprocess.run([*command, "--run-dir", str(tmp_path / "run")], capture_output=True, text=True, check=False)
    assert json.loads((tmp_path / "run" / "outcome.json").read_text())["status"] == "finished", done.stderr
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    found = [path for path in files if any(secret.encode() in path.read_bytes() for secret in SECRETS.values())]
    assert not found and not holds_secret(done.stdout + done.stderr)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "part",
    [
        *("://a:", "authorization ", "&sig", "A_TOKEN_B=", '"password": \\"'),
        *map(nightly, ("://", "a:b@", "Bearer 1", "A_PAT", "https://a", "x-key", "TOKEN_A1", '"password"')),
    ],
)
def test_no_text_makes_redaction_slow(part):
    assert redacted(part * 200_000)


class _RedirectedError(Exception):
    """The error of a web client, with the address to which a server led it."""

    status = 500


@pytest.mark.parametrize(
    "address", ["https://cdn.example/x?anything=s3cret", "https://b.s3.aws/x?X-Amz-Signature=s3cret&a=b"]
)
def test_errors_of_a_store_show_no_query_of_the_address_that_they_name(monkeypatch, caplog, address):
    monkeypatch.setattr(remote, "_WAITS_SECONDS", (0.0,))

    def fail():
        raise _RedirectedError(f"500, message='Oops', url='{address}'")

    with pytest.raises(OSError, match=r"url='https://.*\?\*\*\*'") as failed, caplog.at_level("WARNING"):
        remote._attempt(Path("https://example.org/x"), fail)
    assert "trying again" in caplog.text
    assert not holds_secret(caplog.text + str(failed.value))


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "hf", "https"])
def test_an_address_with_a_query_is_refused_and_not_shown(scheme):
    with pytest.raises(DataError, match="an address with credentials or a query would be recorded") as refused:
        remote.path_of(f"{scheme}://bucket/data.jsonl?sig=s3cret")
    assert not holds_secret(str(refused.value))


def test_a_question_mark_in_the_pattern_of_a_store_is_no_query():
    assert str(remote.path_of("s3://bucket/part-?.jsonl")) == "s3://bucket/part-?.jsonl"


@pytest.mark.parametrize("num_ranks", [1, 100])
def test_a_record_of_many_ranks_is_searched_once_for_each_different_text(monkeypatch, num_ranks):
    calls = []
    search = redaction._redacted
    monkeypatch.setattr(redaction, "_redacted", lambda text, secrets: calls.append(text) or search(text, secrets))
    monkeypatch.setattr(redaction, "_secrets", lambda: calls.append("the environment") or list(SECRETS.values()))
    rank = {"host": f"node with {SECRETS['HF_TOKEN']}", "torch": "2.13.0", "python": "3.11.7"}
    assert not holds_secret(json.dumps(redacted_values({"ranks": [rank] * num_ranks})))
    assert sorted(calls) == sorted(["the environment", *rank.values()])


@pytest.mark.parametrize("text", ["Bearer0123456789abcdef", "passwordhunter2", "HFTOKENx", "0123abcd", "a"])
def test_no_pattern_of_a_secret_is_without_a_sign(text):
    """So that texts of letters and digits need not be searched for each of them."""
    patterns = [redaction._ADDRESS, redaction._ASSIGNED, *(pattern for pattern, _ in redaction._PATTERNS)]
    assert not any(pattern.search(text) for pattern in patterns)
    assert redacted(SECRETS["WANDB_API_KEY"]) == redaction.HIDDEN
