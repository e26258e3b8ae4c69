"""orchestrator: HTTP, sessions and Redis on top of kernelpool. Knows no Docker, no ZeroMQ."""
