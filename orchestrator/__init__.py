"""orchestrator: HTTP, sessions, agent and Redis on top of kernelpool. Knows no Docker, no ZeroMQ."""
