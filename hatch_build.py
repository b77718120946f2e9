"""The addresses of the project, from one line of pyproject.toml: ``repository``."""

from hatchling.metadata.plugin.interface import MetadataHookInterface

PATHS = {
    "Homepage": "",
    "Documentation": "/blob/main/docs/index.md",
    "Changelog": "/blob/main/CHANGELOG.md",
    "Issues": "/issues",
}


class Addresses(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        repository = self.config["repository"]
        metadata["urls"] = {name: repository + path for name, path in PATHS.items()} if repository else {}
