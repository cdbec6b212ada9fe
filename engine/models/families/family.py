"""Family: one architecture of decoder-only models, as differences from the plain decoder."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.models.facts import ModelConfig, RawConfig

Facts = Callable[[ModelConfig, RawConfig], ModelConfig]


@dataclass(frozen=True, slots=True)
class Family:
    """`facts(plain, raw)` turns the plain decoder with this checkpoint's sizes into what the family is, mostly by
    `dataclasses.replace`; `raw` is its config.json. ConfigurationError for variants that are not supported.
    """

    title: str
    facts: Facts
