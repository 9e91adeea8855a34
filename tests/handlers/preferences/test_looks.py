# SPDX-License-Identifier: Apache-2.0
"""The looks of the page: texts, languages, the logo, and what is refused when the server starts."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from engage.api import ConfigError
from engage.config import load
from engage.config.colors import READABLE, contrast
from engage.handlers.preferences.looks import LOGO_BYTES, Look, Looks
from support.commands import run
from support.each import each
from support.server_process import SQLITE

LANGUAGES = ["ar", "de", "en", "es", "fr", "pt"]
FOLDER = resources.files("engage.handlers.preferences")
TEXTS = {name: json.loads(FOLDER.joinpath(f"{name}.json").read_text("utf-8")) for name in LANGUAGES}
GROUP = '[[workspaces.subscription_groups]]\nid = "n"\nchannel = "fax"\ntype = "opt_in"\n'

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a config with a page, and return its path."""

    def write(page: str, *, more: str = "") -> Path:
        path = tmp_path / "engage.toml"
        path.write_text(
            f'{SQLITE}[[workspaces]]\nid = "acme"\nname = "Acme"\n'
            f"[workspaces.preferences_page]\n{page}\n{GROUP}{more}"
        )
        return path

    return write


def look(path: Path) -> Look:
    return Looks(load(path)).of("acme")


def shown(look: Look, **values: Any) -> str:
    words = look.words("", "")
    common = {"detail": "", "status": "", "address": "", "shown": ""}
    lists: dict[str, Any] = {"offers": [], "channels": [], "after": []}
    return look.page(words=words, heading="H", **{**common, **lists, **values}).decode()


@each("language", LANGUAGES)
def test_every_language_has_every_text_with_its_placeholders(language: str) -> None:
    def places(text: str) -> list[str]:
        return sorted(re.findall(r"\{\w+\}", text))

    texts, english = TEXTS[language], TEXTS["en"]
    assert texts.keys() == english.keys()
    for name, text in texts.items():
        assert places(text) == places(english[name]), name
        assert text.strip() or name == "separator"
    assert texts["dir"] == ("rtl" if language == "ar" else "ltr")


def test_the_page_has_the_logo_the_name_and_the_links(write: Write, tmp_path: Path) -> None:
    picture = b"<svg xmlns='http://www.w3.org/2000/svg'/>"
    (tmp_path / "logo.SVG").write_bytes(picture)
    links = 'imprint = "https://a.example/?a=1&b=2"\nprivacy = "https://a.example/privacy"'
    text = shown(look(write(f'name = "A & <B>"\nlogo = "logo.SVG"\n{links}')))
    encoded = base64.b64encode(picture).decode()
    assert f'<img src="data:image/svg+xml;base64,{encoded}" alt="A &amp; &lt;B&gt;">' in text
    assert '<a href="https://a.example/?a=1&amp;b=2" rel="noreferrer">Imprint</a>' in text
    assert '<a href="https://a.example/privacy" rel="noreferrer">Privacy</a>' in text
    plain = shown(look(write("")))
    assert '<header class="brand"><bdi>Acme</bdi></header>' in plain
    assert "<img" not in plain
    assert "<footer" not in plain


def test_values_are_escaped(write: Write) -> None:
    evil = '"><script>alert(1)</script>'
    text = shown(
        look(write("")),
        status=evil,
        detail=evil,
        address=evil,
        offers=[(evil, evil, evil)],
        channels=[(evil, evil, [(evil, evil, True)])],
        shown=evil,
        after=[(evil, evil, evil)],
    )
    assert "<script" not in text
    assert text.count("&lt;script") == 15


def test_the_style_sheet_is_the_one_that_the_policy_allows(write: Write) -> None:
    one = look(write('color = "#7A0019"'))
    [style] = re.findall(r"<style>(.*?)</style>", shown(one), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}';" in one.policy
    light, dark = re.findall(r"--accent: (#\w+)", style)
    assert light == "#7A0019"
    assert contrast(dark, "#17191d") >= READABLE


@pytest.mark.parametrize(("theme", "number"), [("light", 0), ("dark", 1)])
def test_the_colours_of_the_page_are_readable(theme: str, number: int) -> None:
    css = FOLDER.joinpath("style.css").read_text("utf-8")
    matches = re.findall(r":root \{(.*?)\}\n", css.replace("{accent}", "").replace("{dark}", ""))
    colors = dict(re.findall(r"--(\w+): (#\w+)", matches[number]))
    for text, background in (("ink", "card"), ("soft", "card"), ("soft", "bg"), ("ink", "bg")):
        assert contrast(colors[text], colors[background]) >= READABLE, (theme, text, background)
    # The edge of a button: WCAG 2.2, success criterion 1.4.11.
    assert contrast(colors["edge"], colors["card"]) >= 3
    if theme == "dark":
        # What `lightened` is called with, and the text on the buttons.
        assert colors["card"] == colors["on"] == "#17191d"


def test_texts_of_the_operator_replace_and_add(write: Write, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "en.json").write_text('{"title": "What you get", "channel.fax": "Telefax"}')
    (folder / "nl.json").write_text('{"title": "Uw abonnementen", "unsubscribe": "Weg: {group}"}')
    (folder / "he.json").write_text('{"dir": "rtl"}')
    (folder / "README.txt").write_text("not a text")
    one = look(write('texts = "texts"'))
    english, dutch = one.words("en", ""), one.words("", "nl-BE")
    assert (english.text("title"), dutch.text("title")) == ("What you get", "Uw abonnementen")
    assert english.of_channel("channel", "fax") == "Telefax"
    assert english.of_channel("unsubscribe_channel", "fax").endswith("everything: fax")
    assert dutch.text("unsubscribe", group="{name}") == "Weg: {name}"
    # What a new language does not have is English, as engage has it.
    assert dutch.text("save") == "Save my choices"
    assert dutch.of_channel("channel", "fax") == "fax"
    assert one.words("he", "").text("unsubscribe", group="x").endswith("\u2068x\u2069")
    assert one.words("de", "").text("title") == TEXTS["de"]["title"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *(("Dutch.json", "{}", "is not named by a language"), ("nl.json", "{", "cannot be read")),
        *(("nl.json", b"\xff", "cannot be read"), ("nl.json", "[]", "must be a JSON object")),
        ("nl.json", '{"titel": "x"}', "there is no text 'titel'"),
        ("nl.json", '{"title": 5}', "title must be a string"),
        ("nl.json", '{"dir": "left"}', 'dir must be "ltr" or "rtl"'),
        ("nl.json", '{"saved": "Hi {name}"}', "saved has no {name}"),
        ("nl.json", '{"channel.fax": "{group}"}', "channel.fax has no {group}"),
    ],
)
def test_a_wrong_text_stops_the_start(
    write: Write, tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    (tmp_path / "texts").mkdir()
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "texts" / name).write_bytes(data)
    path = write('texts = "texts"')
    with pytest.raises(ConfigError) as caught:
        Looks(load(path))
    assert str(caught.value).startswith(f"{path}: workspaces[0].preferences_page.texts: ")
    assert message in str(caught.value)
    result = run("check", "--config", path)
    assert result.exit_code == 1
    assert message in result.stderr


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ('texts = "nowhere"', "texts: {folder}/nowhere cannot be read: No such file or directory"),
        ('logo = "no.png"', "logo: {folder}/no.png cannot be read: No such file or directory"),
        ('logo = "logo.bmp"', "logo: must be a file with the ending .svg, .png"),
        ('logo = "large.png"', "is too large (65537 bytes; the limit is 65536 bytes)"),
    ],
)
def test_a_wrong_file_stops_the_start(
    write: Write, tmp_path: Path, page: str, message: str
) -> None:
    (tmp_path / "large.png").write_bytes(bytes(LOGO_BYTES + 1))
    with pytest.raises(ConfigError) as caught:
        Looks(load(write(page)))
    assert message.format(folder=tmp_path) in str(caught.value)


def test_the_largest_logo_is_accepted(write: Write, tmp_path: Path) -> None:
    (tmp_path / "large.png").write_bytes(bytes(LOGO_BYTES))
    assert look(write('logo = "large.png"')).logo is not None


def test_an_error_page_does_not_tell_which_workspaces_there_are(write: Write) -> None:
    page = 'imprint = "https://a.example/imprint"'
    alone = Looks(load(write(page)))
    assert alone.neutral is alone.of("acme")
    several = Looks(load(write(page, more='[[workspaces]]\nid = "other"\n')))
    assert (several.neutral.name, several.neutral.imprint) == ("", None)
