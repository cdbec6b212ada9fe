"""The public port: gRPC servicers, API keys, tenants, validation, limits and readiness."""
