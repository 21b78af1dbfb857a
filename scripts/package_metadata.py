"""Metadata of the package that depends on the project's address: its URLs, and a README with absolute links.

Hatchling calls `ReleaseMetadata` for each wheel and source distribution. The address has one place, `project-url` of
`[tool.megascale]` in pyproject.toml. A release sets it there, or in the environment variable `PROJECT_URL`. Without an
address the package has no URLs, and the README keeps its relative links.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

IMAGE = re.compile(r"(!\[[^\]]*\]\()([^()\s]+)\)")
# Links, linked images included; images have absolute targets when these are replaced.
LINK = re.compile(r"(\]\()([^()\s]+)\)")
# A picture of a README in two themes.
HTML_SOURCE = re.compile(r'\b(src|srcset|href)="([^"]+)"')
PLACEHOLDER = "PROJECT_URL"


def read_project_url(root: Path) -> str:
    """Return the project's address without a final slash, or an empty string if no release has set it."""
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    configured = settings["tool"]["megascale"]["project-url"]
    address = os.environ.get("PROJECT_URL") or configured
    return address.rstrip("/")


def is_relative(target: str) -> bool:
    """Return whether a link names a file of the repository."""
    return not re.match(r"[a-z]+:|#|PROJECT_URL", target)


def make_links_absolute(text: str, url: str, revision: str) -> str:
    """Return Markdown whose links name files at `revision` of the repository at `url`."""

    def replace_target(match: re.Match[str], view: str) -> str:
        opening, target = match.groups()
        if not is_relative(target):
            return match[0]
        return f"{opening}{url}/{view}/{revision}/{target})"

    def replace_source(match: re.Match[str]) -> str:
        attribute, target = match.groups()
        if not is_relative(target):
            return match[0]
        view = "blob" if attribute == "href" else "raw"
        return f'{attribute}="{url}/{view}/{revision}/{target}"'

    text = IMAGE.sub(lambda match: replace_target(match, "raw"), text)
    text = LINK.sub(lambda match: replace_target(match, "blob"), text)
    text = HTML_SOURCE.sub(replace_source, text)
    return text.replace(PLACEHOLDER, url)


def list_urls(url: str) -> dict[str, str]:
    """Return the URLs that a package index shows, by label."""
    return {
        "Homepage": url,
        "Documentation": f"{url}/tree/main/docs",
        "Repository": url,
        "Issues": f"{url}/issues",
        "Changelog": f"{url}/blob/main/CHANGELOG.md",
    }


class ReleaseMetadata(MetadataHookInterface):
    """Hook that fills the dynamic fields `readme` and `urls`."""

    def update(self, metadata: dict) -> None:
        """Set `readme` and `urls` in the project's metadata."""
        root = Path(self.root)
        url = read_project_url(root)
        text = (root / "README.md").read_text()
        if url:
            version = metadata["version"]
            # A development version has no tag.
            revision = "main" if "dev" in version else f"v{version}"
            text = make_links_absolute(text, url, revision)
            metadata["urls"] = list_urls(url)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
