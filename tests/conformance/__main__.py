"""Print a Markdown table of the verdicts: case × tracker."""

from __future__ import annotations

import argparse
import logging
from collections import Counter
from typing import get_args

from modtrace.track.native.build import build

from .families import all_cases
from .subjects import SUBJECTS, Verdict, answer
from .torch_users import USERS, counts_the_same


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/conformance", description=__doc__)
    parser.add_argument("--totals", action="store_true", help="only how often each is right, wrong, …")
    parser.add_argument("--trees", action="store_true", help="also print the reported trees that are not right")
    options = parser.parse_args()
    # Torch's trackers log that they are confused; the table shows it better.
    logging.disable(logging.CRITICAL)
    build()
    totals = {subject: Counter[str]() for subject in SUBJECTS}
    rows, wrong = [], []
    for case in all_cases():
        answers = {subject: answer(case, subject) for subject in SUBJECTS}
        for subject, given in answers.items():
            totals[subject][given.verdict] += 1
            if given.verdict in ("wrong", "crash"):
                wrong.append(f"{case.name}, {subject}: {given.verdict}\n{given.trees}\n")
        verdicts = (_shown(given.verdict) for given in answers.values())
        rows.append(f"| {case.family} | {case.name} | {case.about} | {' | '.join(verdicts)} |")
    heads = " | ".join(SUBJECTS)
    print(f"| | {heads} |\n| --- |{' --- |' * len(SUBJECTS)}")
    for verdict in get_args(Verdict):
        print(f"| {verdict} | {' | '.join(str(totals[subject][verdict]) for subject in SUBJECTS)} |")
    if not options.totals:
        print(f"\n| family | case | what it is | {heads} |\n| --- | --- | --- |{' --- |' * len(SUBJECTS)}")
        print("\n".join(rows))
    print("\n| torch's user of its trackers | counts the same with ours |\n| --- | --- |")
    for user in USERS:
        print(f"| {user} | {'yes' if counts_the_same(user, checkpointed=False) else '**no**'} |")
    if options.trees:
        print("\n" + "\n".join(wrong))


def _shown(verdict: str) -> str:
    return f"**{verdict}**" if verdict in ("wrong", "crash") else verdict


if __name__ == "__main__":
    main()
