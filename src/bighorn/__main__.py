"""`python -m bighorn`: which backends work on this machine, and why the others do not."""

import argparse
import sys

import bighorn


def main() -> None:
    """Print the status of the backends."""
    argparse.ArgumentParser(prog="python -m bighorn", description=__doc__).parse_args()
    try:
        print(bighorn.status())
    except ValueError as error:
        sys.exit(f"Error: {error}. Correct the variable, or unset it.")


if __name__ == "__main__":
    main()
