"""Replace what identifies a person or a machine in a text.

What goes into a report is chosen by allow-lists. This is for the texts that pass them and that anybody may have
written, such as names of modules and annotations.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Iterable, Mapping

__all__ = ["Redactor"]

_URL = r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>]+"
_MAIL = r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"
# Two names at least, or one below a home; so that a/b, and/or and // remain.
_PATH = (
    r"(?:(?<![\w>)\]])(?:~[\w.-]*|\.{1,2})?(?:/[^\s/\"'<>|*:;,()\[\]]+){2,}/?|(?<!\w)~[\w.-]*/[^\s\"'<>|*:;,()\[\]]*)"
)
_WINDOWS = r"(?:(?<!\w)[A-Za-z]:[\\/]|\\\\[\w.-]+\\)[^\s\"'<>|*:;,()\[\]]*"
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|sk-[\w-]{20,}|xox[abprs]-[\w-]{10,}|AKIA[A-Z0-9]{12,})"
)
"""Of Hugging Face, GitHub, GitLab, OpenAI and Anthropic, Slack, AWS: by their form, whoever's they are."""
_LOCATION = re.compile(f"(?P<url>{_URL})|(?P<address>{_MAIL})|(?P<path>{_PATH}|{_WINDOWS})")

_SECRET_VARIABLE = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY", re.IGNORECASE)
_MIN_SECRET_LENGTH = 8
_MIN_NAME_LENGTH = 3
# Names of accounts and machines that identify nobody, and may well be those of a module.
_IMPERSONAL_NAMES = frozenset(
    [
        *("root", "user", "users", "home", "admin", "ubuntu", "debian", "docker", "runner", "jovyan", "nobody"),
        *("localhost", "host", "python"),
    ]
)


class Redactor:
    """Replaces what identifies a person or a machine: `redact(text)`.

    That is URLs, mail addresses, paths, access tokens of known forms, and all of `literal` and `words`. The same text
    always gives the same result.

    Args:
        literal: replacements of texts wherever they occur, ignoring case.
        words: replacements of texts that occur as whole words, ignoring case.
    """

    def __init__(self, literal: Mapping[str, str], words: Mapping[str, str]) -> None:
        self._literal = {text.lower(): replacement for text, replacement in literal.items()}
        self._words = {word.lower(): replacement for word, replacement in words.items()}
        self._literal_pattern = _any_of(re.escape(text) for text in _longest_first(literal))
        self._word_pattern = _any_of(rf"(?<![^\W_]){re.escape(word)}(?![^\W_])" for word in _longest_first(words))

    @classmethod
    def of_this_machine(cls, environ: Mapping[str, str] = os.environ) -> Redactor:
        """Return one for this machine: its user, host and home, and values of variables that are named like secrets."""
        homes = {environ.get("HOME", ""), environ.get("USERPROFILE", ""), os.path.expanduser("~")}
        # A path below it is then found as one that starts with ~.
        literal = {home: "~" for home in homes if len(home) > _MIN_NAME_LENGTH and home != "/root"}
        for name, value in environ.items():
            if _SECRET_VARIABLE.search(name) and len(value) >= _MIN_SECRET_LENGTH:
                literal[value] = "<secret>"
        users = {environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER")}
        users |= {_account(), *(os.path.basename(home) for home in homes)}
        hosts = {socket.gethostname(), environ.get("HOSTNAME", ""), environ.get("COMPUTERNAME", "")}
        hosts |= {host.split(".")[0] for host in hosts}
        words = dict.fromkeys(_identifying(hosts), "<host>") | dict.fromkeys(_identifying(users), "<user>")
        return cls(literal, words)

    def __call__(self, text: str) -> str:
        """Return the text with all of it replaced."""
        if self._literal_pattern is not None:
            text = self._literal_pattern.sub(lambda match: self._literal[match[0].lower()], text)
        text = _TOKEN.sub("<secret>", text)
        # Before words: a path with a replaced word in it would no longer look like a path.
        if "/" in text or "\\" in text or "@" in text:
            text = _LOCATION.sub(lambda match: f"<{match.lastgroup}>", text)
        if self._word_pattern is not None:
            text = self._word_pattern.sub(lambda match: self._words[match[0].lower()], text)
        return text


def _identifying(names: Iterable[str]) -> list[str]:
    return [name for name in names if len(name) >= _MIN_NAME_LENGTH and name.lower() not in _IMPERSONAL_NAMES]


def _longest_first(texts: Iterable[str]) -> list[str]:
    return sorted(texts, key=lambda text: (-len(text), text))


def _any_of(parts: Iterable[str]) -> re.Pattern[str] | None:
    pattern = "|".join(parts)
    return re.compile(pattern, re.IGNORECASE) if pattern else None


def _account() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # Windows has no pwd
        return ""  # a user without a name, as in some containers
