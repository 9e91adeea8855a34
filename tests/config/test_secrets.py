# SPDX-License-Identifier: Apache-2.0
"""A secret is clean, or it is refused: wherever the config has one, and whatever stains it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from engage.config import load
from engage.config.schema_check import SettingsError
from engage.config.secrets import stain
from engage.registry import Registry, load_plugins
from engage.store.keys import fingerprint
from support.commands import run

CLEAN = "0123456789abcdef0123456789abcdef"

#: A text and the end of the reason for which it is refused.
STAINED = {
    f"{CLEAN}\r": "ends with a line break (U+000D)",
    f"{CLEAN}\n": "ends with a line break (U+000A)",
    f"{CLEAN}\r\n": "contains a line break (U+000D)",
    f"\n{CLEAN}": "begins with a line break (U+000A)",
    f"{CLEAN}\u2028": "ends with a line break (U+2028)",
    f"{CLEAN} ": "ends with white space (U+0020)",
    f" {CLEAN}": "begins with white space (U+0020)",
    f"{CLEAN}\t": "ends with white space (U+0009)",
    f"{CLEAN[:8]}\t{CLEAN}": "contains white space (U+0009)",
    f"{CLEAN}\xa0": "ends with white space (U+00A0)",
    f"{CLEAN}\u3000": "ends with white space (U+3000)",
    f"{CLEAN}\u200b": "ends with a control or invisible character (U+200B)",
    f"\ufeff{CLEAN}": "begins with a control or invisible character (U+FEFF)",
    f"{CLEAN[:8]}\ufeff{CLEAN}": "contains a control or invisible character (U+FEFF)",
    f"{CLEAN[:8]}\0{CLEAN}": "contains a control or invisible character (U+0000)",
    f"{CLEAN}\x7f": "ends with a control or invisible character (U+007F)",
    f"{CLEAN}\x85": "ends with a line break (U+0085)",
    f"{CLEAN}\udcff": "ends with a control or invisible character (U+DCFF)",
}
PLACEHOLDERS = [
    *("$SUBSCRIPTION_SECRET_OF_THE_WORKSPACE", "$secret_of_the_workspace_of_acme_ltd"),
    *("${SUBSCRIPTION_SECRET_OF_THE_WORKSPACE}", "$(cat /run/secrets/of/the/workspace)"),
    *("%SUBSCRIPTION_SECRET_OF_THE_WORKSPACE%", "{{ secrets.subscription_of_workspace }}"),
    *("{{secrets.subscription_of_workspace}}", "<the secret that you see in the console>"),
    *("<% secrets['the subscription secret'] %>", '"$SUBSCRIPTION_SECRET_OF_WORKSPACE"'),
    *("Bearer $SUBSCRIPTION_SECRET_OF_WORKSPACE", "whsec_$SUBSCRIPTION_SECRET_OF_WORKSPACE"),
]
EXAMPLES = [
    *("changeme", "change-me", "CHANGE_ME", "changeme123", "change it", "please-change-me"),
    *("replace-me", "your-secret", "your_secret_here", "YOUR-WEBHOOK-SECRET", "<your-key>"),
    *("your-password", '"changeme"', "whsec_your_secret", "Bearer your-token", "todo"),
]
#: Texts that secrets may well look like.
REAL = [
    *(CLEAN, "a long random word", "a$b", "$", "$1", "$$", "x$NAME", "$NAME:1", "%41%20b", "100%"),
    *("{a}", "<abc>", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "Basic bXg6c2VjcmV0", "ü", "秘密"),
    *("in\xa0side", "a\u200db", "yourself", "exchange", "changement", '"', "'a", "SECRET", "key"),
]


def config(tmp_path: Path, key: str, values: Sequence[str]) -> Path:
    """Write a config with secrets under a key of :data:`PLACES`."""
    path = tmp_path / "engage.toml"
    value = json.dumps(values if len(values) > 1 else values[0])
    value = value.replace("${", "$${").replace("\x7f", "\\u007f")
    if "\udcff" in values[0]:  # TOML cannot write it; the environment can have it.
        value = '"${STAINED}"'
    path.write_text(PLACES[key].replace("SECRET", value), encoding="utf-8")
    return path


STORAGE = '[storage]\nbackend = "sqlite"\n[storage.sqlite]\n'
WORKSPACE = '[[workspaces]]\nid = "acme"\n'


def webhook(table: str, *, more: str = "") -> str:
    """Return a config with the options of a provider."""
    return f"{STORAGE}{more}{WORKSPACE}[workspaces.webhooks.{table}"


#: Dotted key → a config in which SECRET stands for the value.
PLACES = {
    "erasures.key": f"{STORAGE}[erasures]\nkey = SECRET\n{WORKSPACE}",
    "workspaces[0].subscription_secret": f"{STORAGE}{WORKSPACE}subscription_secret = SECRET",
    "workspaces[0].identity_secret": f"{STORAGE}{WORKSPACE}identity_secret = SECRET",
    "log.kafka.sasl_password": (
        f'{STORAGE}[log.kafka]\nsasl_mechanism = "PLAIN"\nsasl_username = "u"\n'
        f"sasl_password = SECRET\n{WORKSPACE}"
    ),
    "workspaces[0].webhooks.stripe.secret": webhook("stripe]\nsecret = SECRET"),
    "workspaces[0].webhooks.segment.secret": webhook("segment]\nsecret = SECRET"),
    "workspaces[0].webhooks.shopify.client_secret": webhook("shopify]\nclient_secret = SECRET"),
    "workspaces[0].webhooks.customerio.signing_key": webhook("customerio]\nsigning_key = SECRET"),
    "workspaces[0].webhooks.mailchimp.webhook_key": webhook(
        'mailchimp]\npublic_url = "https://a.example/"\nwebhook_key = SECRET'
    ),
    "workspaces[0].webhooks.twilio.auth_token": webhook(
        'twilio]\npublic_url = "https://a.example/"\nauth_token = SECRET'
    ),
    "workspaces[0].webhooks.twilio.shared_keys.k": webhook(
        'twilio]\npublic_url = "https://a.example/"\nshared_keys = { k = SECRET }'
    ),
    "workspaces[0].webhooks.sendgrid.verification_key": webhook(
        "sendgrid]\nverification_key = SECRET"
    ),
    "workspaces[0].webhooks.resend.secret": webhook("resend]\nsecret = SECRET"),
    "workspaces[0].webhooks.standard-webhooks.secret": webhook(
        "standard-webhooks]\nsecret = SECRET"
    ),
    **{
        f"workspaces[0].webhooks.{name}.{option}": webhook(f"{name}]\n{other}{option} = SECRET")
        for name in ("posthog", "amplitude", "rudderstack", "mparticle", "mixpanel", "postmark")
        for option, other in (("value", ""), ("basic_password", 'basic_user = "u"\n'))
    },
}
#: Of these, several can be set.
LISTS = [key for key in PLACES if key not in ("erasures.key", "log.kafka.sasl_password")]
#: Of these, any text is a secret.
FREE = [key for key in LISTS if not any(n in key for n in ("sendgrid", "resend", "standard-"))]


@pytest.fixture(scope="module")
def registry() -> Registry:
    """Return the installed plugins."""
    return load_plugins()


def refusal(registry: Registry, path: Path) -> str:
    """Return the one line with which a config is refused; ``""``: it is accepted."""
    try:
        registry.check(load(path, {"STAINED": f"{CLEAN}\udcff"}))
    except SettingsError as error:
        (line,) = error.problems
        return line.removeprefix(f"{path}: ")
    return ""


def warnings(registry: Registry, path: Path) -> list[str]:
    """Return the warnings about a config."""
    return registry.warnings(load(path))


@pytest.mark.parametrize("text", STAINED)
def test_what_no_service_issues_is_a_stain(text: str) -> None:
    assert stain(text) == STAINED[text]


@pytest.mark.parametrize("text", [*PLACEHOLDERS, *EXAMPLES])
def test_a_placeholder_is_no_secret(text: str) -> None:
    assert stain(text) == (
        "is a placeholder; write the secret itself, or ${NAME} for a variable of the environment"
    )


@pytest.mark.parametrize("text", REAL)
def test_a_secret_may_look_odd(text: str) -> None:
    assert stain(text) is None


@pytest.mark.parametrize("key", PLACES)
def test_each_secret_is_refused_with_its_reason(
    tmp_path: Path, registry: Registry, key: str
) -> None:
    for text in (*STAINED, *PLACEHOLDERS):
        reason = STAINED.get(text) or stain(PLACEHOLDERS[0])
        assert refusal(registry, config(tmp_path, key, [text])) == f"{key}: {reason}", text
    if key != "erasures.key":  # It has 32 characters.
        path = config(tmp_path, key, ["changeme"])
        assert refusal(registry, path) == f"{key}: {stain('changeme')}"


@pytest.mark.parametrize("key", FREE)
def test_only_the_first_secret_of_a_list_is_refused(
    tmp_path: Path, registry: Registry, key: str
) -> None:
    reason = "ends with a line break (U+000D)"
    path = config(tmp_path, key, [f"{CLEAN}\r", CLEAN])
    assert refusal(registry, path) == f"{key}[0]: {reason}"
    path = config(tmp_path, key, [CLEAN, f"{CLEAN}\r", "changeme"])
    assert refusal(registry, path) == ""
    assert warnings(registry, path) == [f"{key}[1]: {reason}", f"{key}[2]: {stain('changeme')}"]


@pytest.mark.parametrize("key", FREE)
def test_a_doubtful_secret_is_accepted_with_a_warning(
    tmp_path: Path, registry: Registry, key: str
) -> None:
    short = "has fewer than 16 characters, so it can be guessed"
    quoted = "is in quotation marks, which are a part of the secret"
    for text, reason in (
        *((CLEAN[:15], short), (CLEAN[:16], None), ("a", short), ("ü" * 15, short), ('"', short)),
        *((f'"{CLEAN}"', quoted), (f"'{CLEAN}'", quoted), (f"“{CLEAN}”", quoted)),
        *((f'{CLEAN}"', None), ('"a"', quoted)),
    ):
        path = config(tmp_path, key, [text])
        assert refusal(registry, path) == ""
        assert warnings(registry, path) == ([f"{key}: {reason}"] if reason else []), text


def test_check_names_the_secret_and_never_its_value(tmp_path: Path) -> None:
    key = "workspaces[0].webhooks.stripe.secret"
    path = config(tmp_path, key, [f"{CLEAN}\r"])
    result = run("check", "--config", path)
    reason = "ends with a line break (U+000D)"
    assert (result.exit_code, result.stderr) == (1, f"engage: {path}: {key}: {reason}\n")
    assert CLEAN not in result.output
    result = run("check", "--config", config(tmp_path, key, [CLEAN, f"{CLEAN}\r"]))
    assert result.exit_code == 0
    assert f"warning\t{key}[1]: {reason}\n" in result.stdout
    assert CLEAN not in result.output


def test_a_write_key_is_refused_like_a_secret_and_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "engage.toml"
    text = f'{WORKSPACE}[[workspaces.write_keys]]\nid = "web"\nkey = '
    for key in ("$WRITE_KEY", "%WRITE_KEY%", "{{write_key}}", "changeme", "YOUR_WRITE_KEY"):
        path.write_text(f'{text}"{key}"')
        with pytest.raises(SettingsError, match=r"write_keys\[0\].key: is a placeholder"):
            load(path)
    path.write_text(f'{text}"wk"')
    assert load(path).warnings == ()
    path.write_text(f"{text}'\"wk\"'")
    (warning,) = load(path).warnings
    assert warning.startswith("workspaces[0].write_keys[0].key: is in quotation marks")


def test_a_url_of_mongodb_is_not_measured_and_must_be_clean(
    tmp_path: Path, registry: Registry
) -> None:
    path = tmp_path / "engage.toml"
    for uri, problem in (
        ("mongodb://db", ""),
        ("mongodb://db/a\\n", "storage.mongo.url: ends with a line break (U+000A)"),
    ):
        path.write_text(f'[storage.mongo]\nurl = "{uri}"\n{WORKSPACE}')
        assert refusal(registry, path) == problem
        assert problem or warnings(registry, path) == []


def test_a_stained_key_for_erasures_is_accepted_if_it_was_used(tmp_path: Path) -> None:
    """A backup can only be compared with the key that made the hashes."""
    key = f"{CLEAN}\r"
    path = config(tmp_path, "erasures.key", [key])
    file = tmp_path / "engage.toml.erasures"
    line = {"workspace": "acme", "kind": "user", "hash": "0" * 64, "at": 1}
    for used, accepted in ((CLEAN, False), (key, True)):
        file.write_text(json.dumps({**line, "key": fingerprint(used)}, separators=(",", ":")))
        if accepted:
            assert load(path).warnings == ("erasures.key: ends with a line break (U+000D)",)
            assert load(path).erasures.key == key
        else:
            with pytest.raises(SettingsError, match="ends with a line break"):
                load(path)


@pytest.mark.parametrize("more", ["", "\n", "\r\n", "\n\n"])
def test_a_file_loses_the_line_breaks_at_its_end(tmp_path: Path, more: str) -> None:
    (tmp_path / "secret").write_bytes(b"\xef\xbb\xbf" + (CLEAN + more).encode())
    path = tmp_path / "engage.toml"
    path.write_text(f'{WORKSPACE}subscription_secret = "${{file:secret}}"')
    assert load(path).workspaces[0].subscription_secrets == (CLEAN,)


PLUGIN = """
from engage import api, webhooks

class Signed(webhooks.SecretProvider):
    secret_option = "token"
    signing = api.Signing(signature="x", body=True)
    def verify(self, request, fetched): ...
    def translate(self, request): ...

class Static(webhooks.StaticCredentialProvider):
    def translate(self, request): ...

OPTIONS = {"type": "object", "properties": {
    "token": {"type": ["string", "array"]}, "value": {"type": "string"}, "mode": {}}}

@api.hookimpl
def engage_register_webhook(register):
    register("signed", Signed, OPTIONS)
    register("static", Static, OPTIONS)
"""


@pytest.mark.parametrize(("provider", "option"), [("signed", "token"), ("static", "value")])
def test_a_plugin_need_not_mark_its_secret(tmp_path: Path, provider: str, option: str) -> None:
    (tmp_path / "own.py").write_text(PLUGIN)
    path = tmp_path / "engage.toml"
    key = f"workspaces[0].webhooks.{provider}.{option}"
    start = f'[plugins]\nfiles = ["own.py"]\n{STORAGE}{WORKSPACE}[workspaces.webhooks.{provider}]\n'
    path.write_text(f'{start}mode = " x "\n{option} = "{CLEAN} "')
    own = load_plugins(load(path))
    assert refusal(own, path) == f"{key}: ends with white space (U+0020)"
    path.write_text(f'{start}mode = " x "\n{option} = "hunter2"')
    assert refusal(own, path) == ""
    assert warnings(own, path) == [f"{key}: has fewer than 16 characters, so it can be guessed"]
    assert list(own.secrets(load(path))) == [("webhook", "hunter2")]


WITHOUT_SECRETS = f"""
{STORAGE}
[server]
host = "${{ABSENT}}"
trusted_proxies = ["${{ABSENT}}"]
[console]
password = "${{file:absent}}"
[log.kafka]
sasl_password = "${{ABSENT}}"
[erasures]
key = "${{ABSENT}}"
[cors]
origins = ["${{ABSENT}}"]
[logging]
level = "${{ABSENT}}"
[observers.x]
key = "${{ABSENT}}"
{WORKSPACE}
subscription_secret = ["${{STAINED}}", "${{ABSENT}}"]
identity_secret = "${{ABSENT}}"
verify_identity = "required"
[[workspaces.write_keys]]
id = "web"
key = "${{ABSENT}}"
[[workspaces.write_keys]]
id = "servers"
kind = "server"
sha256 = "${{file:absent}}"
[workspaces.webhooks.stripe]
secret = "${{ABSENT}}"
"""
#: Commands that only read the store.
READING = [
    *(("export", "events"), ("export", "user", "--user", "ann"), ("subscriptions", "export")),
    *(("users", "show", "ann"), ("dead-letters", "list"), ("dead-letters", "show", "0")),
    *(("erase", "requests"), ("backup", "copy.db")),
]


@pytest.mark.parametrize("command", READING, ids=" ".join)
def test_a_command_that_reads_the_store_needs_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "engage.toml"
    monkeypatch.setenv("STAINED", f"{CLEAN}\r")
    path.write_text(WITHOUT_SECRETS)
    result = run(*command, "--config", path)
    assert result.exit_code == 1
    assert "there is no store" in result.stderr
    path.write_text(WITHOUT_SECRETS.replace('"sqlite"', '"${ABSENT}"'))
    result = run(*command, "--config", path)
    assert "storage.backend: the environment variable ABSENT is not set" in result.stderr


@pytest.mark.parametrize(
    ("command", "needed"),
    [
        (("suppressions", "list"), "erasures.key"),
        (("suppressions", "check", "--group", "news", "-"), "erasures.key"),
        (("keys", "list"), "workspaces[0].write_keys[0].key"),
        (("verify",), "log.kafka.sasl_password"),
    ],
)
def test_a_command_names_the_secret_that_it_needs(
    tmp_path: Path, command: tuple[str, ...], needed: str
) -> None:
    path = tmp_path / "engage.toml"
    path.write_text(WITHOUT_SECRETS)
    result = run(*command, "--config", path)
    assert f"{needed}: the environment variable ABSENT is not set" in result.stderr
    assert "stripe" not in result.stderr
    assert "subscription_secret" not in result.stderr


def test_a_command_that_reads_still_refuses_a_wrong_config(tmp_path: Path) -> None:
    path = tmp_path / "engage.toml"
    path.write_text(f'{WITHOUT_SECRETS}prot = 1\n[limits]\nbatch_events = "x"\n')
    with pytest.raises(SettingsError) as caught:
        load(path, {}, reads_with=())
    assert len(caught.value.problems) == 1
    assert "limits.batch_events: must be an integer" in caught.value.problems[0]
