"""`python -m rlhf_kl`, which a process that a user's code starts imports too: it needs nothing of the program."""

import os
import sys


def main() -> None:
    """Run the command line."""
    if sys.path[0] in ("", os.getcwd()):  # as Python does for `-m`: a user's random.py would come before Python's own
        sys.path.append(sys.path.pop(0))
    from rlhf_kl import cli

    cli.main()


if __name__ == "__main__":
    main()
