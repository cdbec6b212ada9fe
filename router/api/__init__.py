"""The public port: gRPC servicers, tenants and their API keys, validation, and what operators see."""
