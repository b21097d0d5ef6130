"""``specdec.cli.ray_decoder`` and ``ray_serve`` under a shorter name: specdec on clusters of Ray."""

from .cli.ray_decoder import Decoder
from .cli.ray_serve import serve_app

__all__ = ["Decoder", "serve_app"]
