"""The workers as the router sees them: registry, connections, health and canaries."""
