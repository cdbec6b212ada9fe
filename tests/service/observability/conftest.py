"""Routers as in the router's own tests."""

from tests.service.router.conftest import make_mesh, model_dir

__all__ = ["make_mesh", "model_dir"]
