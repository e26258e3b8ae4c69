"""HTTP routes: parse, call, answer. Each module is one kind of object."""
