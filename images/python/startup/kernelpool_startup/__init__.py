"""The kernel's start-up code: an IPython kernel that loses no output and behaves like a script.

Runs inside the sandbox as `python -P -m kernelpool_startup -f CONNECTION_FILE`. Above it is whoever
started the sandbox and speaks the Jupyter protocol to it; below it is ipykernel. Nothing of the
server can be imported here, and nothing here may be trusted by the server: the code that users run
lives in the same process.
"""
