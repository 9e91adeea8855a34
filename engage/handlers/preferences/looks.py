# SPDX-License-Identifier: Apache-2.0
"""The looks of each workspace's preferences page: texts, languages, colours and the logo.

They are read and checked when the server starts, so that a mistake stops it and not a person who
wants to unsubscribe.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tornado import template

from engage.api import ConfigError
from engage.config.colors import lightened

if TYPE_CHECKING:
    from engage.config import Config, PreferencesPage, SubscriptionGroup

__all__ = ["LOGO_BYTES", "Look", "Looks", "Words"]

#: The logo is part of the page.
LOGO_BYTES: Final = 64 * 1024
_KINDS: Final[Mapping[str, str]] = {
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
}
#: What the buttons stand on in dark mode, as in ``style.css``.
_DARK: Final = "#17191d"

#: A text for each channel that an operator names may be added.
_OF_CHANNELS: Final = ("channel.", "unsubscribe_channel.")
_PLACEHOLDER: Final = re.compile(r"\{(\w+)\}")
_LANGUAGE: Final = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*", re.ASCII)
#: A language and its weight in ``Accept-Language`` (RFC 9110, section 12.5.4).
_ACCEPTED: Final = re.compile(r"\s*([A-Za-z0-9-]{1,35})\s*(?:;\s*q=([0-9.]{1,5})\s*)?", re.ASCII)

#: People do not read more languages.
_MAX_LANGUAGES: Final = 32

#: Language → name of a text → text.
_Texts = dict[str, dict[str, str]]


class Words:
    """The texts of one language.

    :param language: its code.
    :param texts: name → text; a text may have ``{placeholders}``.
    """

    def __init__(self, language: str, texts: Mapping[str, str]) -> None:
        self.language = language
        self.right_to_left = texts["dir"] == "rtl"
        self._texts = texts

    def text(self, key: str, /, **values: str) -> str:
        """Return a text with values in its placeholders."""

        def value(placeholder: re.Match[str]) -> str:
            # A name in Latin letters must not change the order of the words around it.
            inner = values[placeholder[1]]
            return f"\u2068{inner}\u2069" if self.right_to_left else inner

        return _PLACEHOLDER.sub(value, self._texts[key])

    def of_channel(self, name: str, channel: str) -> str:
        """Return a text about a channel, which may have a text of its own."""
        if f"{name}.{channel}" in self._texts:
            return self.text(f"{name}.{channel}")
        return self.text(name, channel=channel) if name in self._texts else channel

    def group(self, group: SubscriptionGroup) -> str:
        """Return the name of a group in this language."""
        primary = self.language.partition("-")[0]
        return group.names.get(self.language, group.names.get(primary, group.name))


class Look:
    """The looks of one workspace's page.

    :param page: the settings.
    :param name: who sends the messages; ``""``: the page does not say.
    :param base: paths of the settings are relative to this folder.
    :raises ConfigError: if a file is missing or wrong.
    """

    def __init__(self, page: PreferencesPage, name: str, base: Path) -> None:
        self.name = name
        self.imprint = page.imprint
        self.privacy = page.privacy
        self.logo = None if page.logo is None else _data_url(base / page.logo)
        #: Style sheet, in the page, and the policy that allows it.
        self.style, self.policy = _style(page.color)
        self._languages = dict(_built_in())
        if page.texts is not None:
            _add_texts(self._languages, base / page.texts)

    def words(self, language: str, accepted: str) -> Words:
        """Return the texts in the best language that there is.

        :param language: the language that a link names; ``""``: none.
        :param accepted: the header ``Accept-Language``.
        """
        ranked: list[tuple[float, str]] = []
        for part in accepted.split(",")[:_MAX_LANGUAGES]:
            if entry := _ACCEPTED.fullmatch(part):
                try:
                    weight = float(entry[2] or 1)
                except ValueError:
                    continue
                if weight > 0:
                    ranked.append((-weight, entry[1]))
        codes = {code.lower(): code for code in self._languages}
        for tag in (language, *(tag for _, tag in sorted(ranked, key=lambda pair: pair[0]))):
            for form in (tag.lower(), tag.lower().partition("-")[0]):
                if form in codes:
                    return Words(codes[form], self._languages[codes[form]])
        return Words("en", self._languages["en"])

    def page(self, **values: Any) -> bytes:
        """Return the page.

        :param values: the names that ``page.html`` lists.
        """
        return _template().generate(look=self, **values)


class Looks:
    """The looks of all workspaces.

    :raises ConfigError: if a file of one is missing or wrong.
    """

    def __init__(self, config: Config) -> None:
        self._looks: dict[str, Look] = {}
        for number, workspace in enumerate(config.workspaces):
            page = workspace.preferences_page
            try:
                look = Look(page, page.name or workspace.name, config.base_dir)
            except ConfigError as error:
                place = f"{config.path}: workspaces[{number}].preferences_page"
                raise ConfigError(f"{place}.{error}") from error
            self._looks[workspace.id] = look
        #: Of a page that must not tell which workspaces there are.
        self.neutral = look if len(self._looks) == 1 else Look(type(page)(), "", config.base_dir)

    def of(self, workspace_id: str) -> Look:
        """Return the looks of a workspace."""
        return self._looks[workspace_id]


@functools.cache
def _template() -> template.Template:
    return template.Template(_packaged("page.html"), autoescape="xhtml_escape")


@functools.cache
def _style(color: str) -> tuple[str, str]:
    """Return the style sheet with a colour, and the Content-Security-Policy of its page: without
    scripts, and without content from elsewhere."""
    colors = {"accent": color, "dark": lightened(color, _DARK)}
    css = _PLACEHOLDER.sub(lambda placeholder: colors[placeholder[1]], _packaged("style.css"))
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; form-action 'self';"
        " base-uri 'none'; frame-ancestors 'none'"
    )
    return css, policy


@functools.cache
def _packaged(name: str) -> str:
    return resources.files("engage.handlers.preferences").joinpath(name).read_text("utf-8")


@functools.cache
def _built_in() -> _Texts:
    folder = resources.files("engage.handlers.preferences")
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".json"))
    return {name.removesuffix(".json"): json.loads(_packaged(name)) for name in names}


def _data_url(path: Path) -> str:
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        raise ConfigError(f"logo: must be a file with the ending {', '.join(_KINDS)}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"logo: {path} cannot be read: {error.strerror or error}") from error
    if len(content) > LOGO_BYTES:
        limit = f"the limit is {LOGO_BYTES} bytes"
        raise ConfigError(f"logo: {path} is too large ({len(content)} bytes; {limit})")
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _add_texts(languages: _Texts, folder: Path) -> None:
    """Replace and add texts by those in the files of a folder; what a new language does not have
    is English."""
    english = _built_in()["en"]
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".json")
    except OSError as error:
        raise ConfigError(f"texts: {folder} cannot be read: {error.strerror or error}") from error
    for path in paths:
        if _LANGUAGE.fullmatch(path.stem) is None:
            raise ConfigError(f"texts: {path} is not named by a language, such as nl.json")
        try:
            texts = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"texts: {path} cannot be read: {error}") from error
        if not isinstance(texts, dict):
            raise ConfigError(f"texts: {path} must be a JSON object")
        for name, text in texts.items():
            if name not in english and not name.startswith(_OF_CHANNELS):
                raise ConfigError(f"texts: {path}: there is no text {name!r}")
            if not isinstance(text, str) or (name == "dir" and text not in ("ltr", "rtl")):
                rule = 'must be "ltr" or "rtl"' if name == "dir" else "must be a string"
                raise ConfigError(f"texts: {path}: {name} {rule}")
            placeholders = set(_PLACEHOLDER.findall(english.get(name, "")))
            if unknown := set(_PLACEHOLDER.findall(text)) - placeholders:
                raise ConfigError(f"texts: {path}: {name} has no {{{min(unknown)}}}")
        languages[path.stem] = {**languages.get(path.stem, english), **texts}
