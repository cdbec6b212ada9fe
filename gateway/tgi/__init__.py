"""Text Generation Inference's API: /, /generate, /generate_stream, /tokenize, /chat_tokenize, /info."""

from gateway.tgi.routes import routes

__all__ = ["routes"]
