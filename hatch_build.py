"""The addresses of the project, from one line of pyproject.toml: ``repository``."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

PATHS = {
    "Homepage": "",
    "Documentation": "/blob/main/docs/index.md",
    "Changelog": "/blob/main/CHANGELOG.md",
    "Issues": "/issues",
}


def absolute(text: str, repository: str) -> str:
    """Markdown whose links and pictures a package index shows; unchanged where there is no repository."""
    link = re.compile(r"(!?)\[([^]]*)\]\((?!\w+:|#)([^)]+)\)")
    kind = {"!": "raw", "": "blob"}
    return link.sub(lambda m: f"{m[1]}[{m[2]}]({repository}/{kind[m[1]]}/main/{m[3]})", text) if repository else text


class Addresses(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        repository = self.config["repository"]
        metadata["urls"] = {name: repository + path for name, path in PATHS.items()} if repository else {}
        text = absolute(Path(self.root, "README.md").read_text(encoding="utf-8"), repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
