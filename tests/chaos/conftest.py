"""Checkpoints, as for the end-to-end tests."""

from tests.e2e.conftest import checkpoint, reference

__all__ = ["checkpoint", "reference"]
