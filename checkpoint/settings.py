"""Settings of every service that reads a model's files."""

from dataclasses import dataclass, replace
from typing import Self

from checkpoint.rope_override import RopeOverride
from checkpoint.source import ModelSource, Progress
from mesh.rpc.settings import MemberSettings
from mesh.settings import setting


@dataclass(frozen=True, kw_only=True)
class ModelSettings(MemberSettings):
    """The constructor validates the values; `located` finds or downloads the files."""

    model: str = setting(
        ...,
        "checkpoint folder, org/name on the Hugging Face hub, or s3://bucket/prefix",
        env=("MODEL_ID", "HF_MODEL_ID"),
    )
    name: str = setting("", "served model name; default: the model's name without path or organisation")
    revision: str = setting("", "branch, tag or commit on the hub", env=("HF_MODEL_REVISION", "HF_REVISION"))
    model_cache: str = setting("~/.cache/tandem", "folder for models downloaded from S3")
    rope_scaling: str = setting(
        "",
        "scaling of rotary positions that replaces the checkpoint's: JSON as in config.json, "
        'such as {"rope_type": "linear", "factor": 2.0}',
    )
    rope_theta: float = setting(0.0, "base of rotary positions that replaces the checkpoint's; 0: keep it")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rope_override()

    @property
    def source(self) -> ModelSource:
        return ModelSource(self.model, self.revision, self.model_cache)

    @property
    def served_name(self) -> str:
        """The model name that clients use in requests."""
        return self.name or self.source.short_name

    def rope_override(self) -> RopeOverride:
        """Return the rotary positions that replace the checkpoint's. Raises ConfigurationError."""
        return RopeOverride(self.rope_scaling, self.rope_theta)

    def located(self, on_progress: Progress = lambda fraction: None) -> Self:
        """Return settings whose `model` is a local folder, downloaded if needed. Raises ConfigurationError."""
        folder = self.source.locate(on_progress)
        return replace(self, model=str(folder), name=self.served_name, revision="")
