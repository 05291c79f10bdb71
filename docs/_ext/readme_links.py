"""The README for a package index, which has none of the repository's files: its links made absolute.

    python docs/_ext/readme_links.py README.md URL [FOLDER]     rewrites the file, whose links start in a folder

`make dist` calls this for a copy of the README. Pictures lead to the raw file, other links to its page.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path


def absolute(text: str, repository: str, folder: str = "") -> str:
    """The text with each relative link of the repository in full."""

    def full(match: re.Match[str]) -> str:
        kind = "raw" if match[1].endswith(".svg") else "blob"
        return f"]({repository}/{kind}/main/{posixpath.normpath(posixpath.join(folder, match[1]))})"

    return re.sub(r"\]\((?!https?://|#)([^)]+)\)", full, text)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(absolute(path.read_text(), *sys.argv[2:]))
