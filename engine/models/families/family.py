"""Family: one architecture of decoder-only models, as differences from the plain decoder (ModelConfig's defaults)."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.models.facts import ModelConfig, RawConfig

Facts = Callable[[ModelConfig, RawConfig], ModelConfig]


@dataclass(frozen=True, slots=True)
class Family:
    """`facts(plain, raw)` returns the family's ModelConfig, usually by `dataclasses.replace`.

    `plain` is the plain decoder with this checkpoint's sizes, `raw` its config.json. It raises ConfigurationError for
    variants that are not supported.
    """

    title: str
    facts: Facts
