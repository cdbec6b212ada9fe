"""The workers as the router sees them: registry, connections, canaries and circuit breakers."""
