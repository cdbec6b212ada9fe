"""OpenAI's /v1/responses, without state: nothing is stored, and a request has its whole conversation."""
