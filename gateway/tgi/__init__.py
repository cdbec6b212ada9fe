"""Text Generation Inference's API: /, /generate, /generate_stream, /tokenize, /chat_tokenize, /info."""
