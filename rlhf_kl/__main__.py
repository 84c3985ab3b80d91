"""`python -m rlhf_kl`."""


def main() -> None:
    """Run the command line. Processes that a user's code starts import this file, and need nothing of the program."""
    from rlhf_kl import cli

    cli.main()


if __name__ == "__main__":
    main()
