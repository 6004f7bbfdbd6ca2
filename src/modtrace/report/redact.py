"""Texts without what names a person or a machine.

What goes into a report is chosen by allow-lists. This is what remains for texts that anybody may have written: names of
modules, threads, marks and annotations.
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
_PLACES = re.compile(f"(?P<url>{_URL})|(?P<address>{_MAIL})|(?P<path>{_PATH}|{_WINDOWS})")

_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY", re.IGNORECASE)
_SHORTEST_SECRET = 8
_SHORTEST_NAME = 3
# Names of accounts and machines that name nobody, and may well be those of a module.
_NOBODY = frozenset(
    [
        *("root", "user", "users", "home", "admin", "ubuntu", "debian", "docker", "runner", "jovyan", "nobody"),
        *("localhost", "host", "python"),
    ]
)


class Redactor:
    """Replaces what names a person or a machine: `redact(text)`.

    Addresses, paths, and whatever of `literal` and `words` there is; the same text always becomes the same.

    Args:
        literal: what to replace wherever it stands, in any case, by what it is replaced with.
        words: what to replace where it stands as a word, in any case, by what it is replaced with.
    """

    def __init__(self, literal: Mapping[str, str], words: Mapping[str, str]) -> None:
        self._literal = {text.lower(): put for text, put in literal.items()}
        self._words = {word.lower(): put for word, put in words.items()}
        self._literals = _any_of(re.escape(text) for text in _longest_first(literal))
        self._word = _any_of(rf"(?<![^\W_]){re.escape(word)}(?![^\W_])" for word in _longest_first(words))

    @classmethod
    def of_this_machine(cls, environ: Mapping[str, str] = os.environ) -> Redactor:
        """Return one that knows the user, the machine, the home, and what in the environment is called a secret."""
        homes = {environ.get("HOME", ""), environ.get("USERPROFILE", ""), os.path.expanduser("~")}
        # What lies below it is then a path.
        literal = {home: "~" for home in homes if len(home) > _SHORTEST_NAME and home != "/root"}
        for name, value in environ.items():
            if _SECRET.search(name) and len(value) >= _SHORTEST_SECRET:
                literal[value] = "<secret>"
        users = {environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER")}
        users |= {_account(), *(os.path.basename(home) for home in homes)}
        hosts = {socket.gethostname(), environ.get("HOSTNAME", ""), environ.get("COMPUTERNAME", "")}
        hosts |= {host.split(".")[0] for host in hosts}
        words = dict.fromkeys(_telling(hosts), "<host>") | dict.fromkeys(_telling(users), "<user>")
        return cls(literal, words)

    def __call__(self, text: str) -> str:
        """Return the text without them."""
        if self._literals is not None:
            text = self._literals.sub(lambda found: self._literal[found[0].lower()], text)
        # Before the words: a path with a hole in it would be none any more.
        if "/" in text or "\\" in text or "@" in text:
            text = _PLACES.sub(lambda found: f"<{found.lastgroup}>", text)
        if self._word is not None:
            text = self._word.sub(lambda found: self._words[found[0].lower()], text)
        return text


def _telling(names: Iterable[str]) -> list[str]:
    return [name for name in names if len(name) >= _SHORTEST_NAME and name.lower() not in _NOBODY]


def _longest_first(texts: Iterable[str]) -> list[str]:
    return sorted(texts, key=lambda text: (-len(text), text))


def _any_of(parts: Iterable[str]) -> re.Pattern[str] | None:
    pattern = "|".join(parts)
    return re.compile(pattern, re.IGNORECASE) if pattern else None


def _account() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""  # a user without a name, as in some containers
