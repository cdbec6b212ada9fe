"""The public port's gRPC services: generation for clients, and what operators see and do. They only translate."""
