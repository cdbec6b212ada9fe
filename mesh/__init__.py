"""What every service shares: domain nouns, errors, rpc plumbing, registry, telemetry, settings."""
