"""Hooks of mkdocs (mkdocs.yml): links of pages to files outside of docs/ lead to the repository, and the API reference
is a part of the site."""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<=\]\()(?!\w+://)[^)#\s]+")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def from_the_site(link: re.Match) -> str:
        goal = posixpath.normpath(posixpath.join(folder, link[0]))
        return link[0] if goal.startswith("docs/") else f"{config.repo_url}/blob/main/{goal}"

    return LINK.sub(from_the_site, markdown)


def on_post_build(config: Any) -> None:
    program = Path(__file__).with_name("api_reference.py")
    subprocess.run([sys.executable, program, "--output", Path(config.site_dir) / "api"], check=True)
