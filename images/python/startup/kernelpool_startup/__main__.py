"""Entry point: the environment is put right before anything that reads it is imported."""

import argparse

from kernelpool_startup import environment


def main() -> None:
    """Start a kernel on the connection file given with `-f` and serve until it is shut down."""
    parser = argparse.ArgumentParser(prog="kernelpool_startup", allow_abbrev=False)
    parser.add_argument("-f", dest="connection_file", required=True)
    connection_file = parser.parse_args().connection_file
    settings = environment.prepare()

    from kernelpool_startup import app

    app.launch(connection_file, settings)


if __name__ == "__main__":
    main()
