"""OpenAI's API, with vLLM's extensions: /v1/models, /v1/completions, /v1/chat/completions."""
