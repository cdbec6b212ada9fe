"""Settings of every service that reads a model's files."""

from dataclasses import dataclass, replace
from typing import Self

from mesh.model_source import ModelSource, Progress
from mesh.rpc.settings import MemberSettings
from mesh.settings import setting


@dataclass(frozen=True, kw_only=True)
class ModelSettings(MemberSettings):
    """Checked on construction, but for the files themselves: `located` looks for them."""

    model: str = setting(
        ...,
        "checkpoint folder, org/name on the Hugging Face hub, or s3://bucket/prefix",
        env=("MODEL_ID", "HF_MODEL_ID"),
    )
    name: str = setting("", "served model name; default: the model's own, without path or organisation")
    revision: str = setting("", "branch, tag or commit on the hub", env=("HF_MODEL_REVISION", "HF_REVISION"))
    model_cache: str = setting("~/.cache/tandem", "folder for copies of models from S3")

    @property
    def source(self) -> ModelSource:
        """Where the model comes from."""
        return ModelSource(self.model, self.revision, self.model_cache)

    @property
    def served_name(self) -> str:
        """Model name that requests use."""
        return self.name or self.source.short_name

    def located(self, on_progress: Progress = lambda fraction: None) -> Self:
        """The same with the model's folder on this machine, downloaded if need be. Raises ConfigurationError."""
        folder = self.source.locate(on_progress)
        return replace(self, model=str(folder), name=self.served_name, revision="")
