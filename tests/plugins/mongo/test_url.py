# SPDX-License-Identifier: Apache-2.0
"""Connection strings: options in every spelling, and what is shown of them."""

from __future__ import annotations

import pytest

from engage.api import ConfigError
from engage_plugins.mongo import url
from engage_plugins.mongo.connection import Connection


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("w=1", "w=1"),
        ("W=dc", "w=dc"),
        ("w=%31", "w=1"),
        ("w=01", "w=1"),
        ("journal=false", "journal=false"),
        ("w=majority;journal=%66alse", "journal=false"),
        ("JOURNAL=false", "journal=false"),
    ],
)
@pytest.mark.parametrize("scheme", ["mongodb", "mongodb+srv"])
def test_weak_options_are_found_in_every_spelling(scheme: str, options: str, said: str) -> None:
    given = f"{scheme}://a.example.net/x?{options}"
    with pytest.raises(ConfigError, match=said):
        Connection(given, allow_weak=False, timeout=8.0)
    assert len(Connection(given, allow_weak=True, timeout=8.0).weaknesses) == 1


@pytest.mark.parametrize("options", ["w=0", "w=%30", "w=00&journal=false", "w=0;journal=false"])
@pytest.mark.parametrize("scheme", ["mongodb", "mongodb+srv"])
def test_no_acknowledgement_is_never_allowed_in_any_spelling(scheme: str, options: str) -> None:
    with pytest.raises(ConfigError, match="w=0"):
        Connection(f"{scheme}://a.example.net/x?{options}", allow_weak=True, timeout=8.0)


@pytest.mark.parametrize(
    "given",
    [
        # Cut in the password: the rest must not be read as host, port or database.
        "mongodb://secretuser:123/secretpass@127.0.0.1",
        "mongodb://secretuser:123?appname=secretpass@127.0.0.1/x",
        "mongodb://u:p@127.0.0.1/secretpass@x",
        "mongodb+srv://secretuser:secret/pass@a.example.net/x",
        "mongodb+srv://secretuser:secret?pass@a.example.net/x",
        "mongodb+srv://secretuser:sec@ret@a.example.net/x",
        "mongodb+srv://secretuser:secret%ZZ@a.example.net/x",
        "mongodb+srv://secretuser:secret@a.example.net:27017/x",
        "mongodb+srv://secretuser:secret@a.example.net,b.example.net/x",
        "mongodb+srv://secretuser:secret@a.example.net/x?secret=1",
        "mongodb://secretuser:secret%zz@h:99999/x",
        "mongodb://secretuser:secret@h/x?tlsss=secret",
        "mongodb://secretuser:secret@h/x?timeoutMS=secret",
        # Each is valid, but not both.
        "mongodb://secretuser:secret@127.0.0.1/x?minPoolSize=500",
        "mongodb://secretuser:secret@127.0.0.1/x?fsync=true",
        "mongodb://secretuser:secret@127.0.0.1/x?tls=true&tlsCertificateKeyFile=/dev/null",
    ],
)
def test_an_unusable_url_is_an_error_that_does_not_show_it(given: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Connection(given, allow_weak=False, timeout=8.0)
    assert "secret" not in str(raised.value)
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None or raised.value.__suppress_context__


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^url: a file named in it cannot be read \("):
        url.parse_url("mongodb://h/x?tlsCAFile=/nowhere/secret.pem")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("mongodb://u:p@h,i:1/x?appname=a@b", "mongodb://h:27017,i:1/x"),
        ("mongodb://u:p@h/a.b$", "mongodb://h:27017/a"),
        ("mongodb://h?appname=ab", "mongodb://h:27017/engage"),
        ("mongodb://%2Ftmp%2Fmongodb.sock/x", "mongodb:///tmp/mongodb.sock:None/x"),
        ("mongodb+srv://u:p@a.example.net", "mongodb+srv://a.example.net/engage"),
        ("mongodb+srv://u:p@a.example.net/x?w=majority", "mongodb+srv://a.example.net/x"),
    ],
)
def test_a_url_is_shown_without_credentials(given: str, name: str) -> None:
    assert url.parse_url(given).name == name


async def test_a_silent_dns_fails_within_the_time_of_a_call() -> None:
    """The driver's limit is 20 s, and no other limit ends its query."""
    made = Connection("mongodb+srv://a.example.net/x?timeoutMS=1000", allow_weak=False, timeout=8.0)
    made.connect()
    assert made.db.client.options.pool_options.connect_timeout == 0.5
    await made.close()
