"""Measures kernelpool against plain jupyter_client, in pairs, in one run: `python -m benchmarks`.

One module per measurement (`warm`, `create`, `cold`, `many`, `lines`, `files`, `memory`,
`destroy`); `plain` is the reference, `product` the service under measurement, `http_client` what
talks to it, `figures` the numbers, `report` the table and the JSON.
"""
