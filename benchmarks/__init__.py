"""Measures kernelpool against plain jupyter_client, in pairs, in one run: `python -m benchmarks`.

One module per measurement (`warm`, `create`, `cold`, `many`, `lines`, `files`, `memory`,
`destroy`); `plain` is the reference, `product` the service under measurement, `http_client` what
talks to it, `figures` the numbers, `report` the table and the JSON, `page` the reference page.
`store_calls` and `http_layer` look closer at one layer each and run by themselves.
"""
