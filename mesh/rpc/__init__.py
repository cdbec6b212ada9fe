"""gRPC plumbing shared by all services: servers, channels, credentials, statuses."""
