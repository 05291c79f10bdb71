"""Every planted fault changes one place of the present sources, and names tests that exist."""

from __future__ import annotations

from collections import Counter

from tests.mutation.faults import FAULTS
from tests.mutation.run import PACKAGES, ROOT


def test_faults_can_be_planted() -> None:
    for fault in FAULTS:
        (source,) = (each for package in PACKAGES if (each := package.parent / fault.file).is_file())
        assert source.read_text().count(fault.right) == 1, f"{fault.family}: {fault.file} has not {fault.right!r} once"
        files = [word for word in fault.tests.split(" -k ")[0].split() if not word.startswith("-")]
        assert [name for name in files if not (ROOT / name).exists()] == [], fault.family


def test_names_differ() -> None:
    assert [name for name, count in Counter(fault.family for fault in FAULTS).items() if count > 1] == []
