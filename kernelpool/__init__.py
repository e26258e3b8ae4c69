"""kernelpool: live IPython kernels in sandboxes. Knows no HTTP, no Redis, no agent."""
