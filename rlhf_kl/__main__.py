"""`python -m rlhf_kl`."""

from rlhf_kl.cli import main

if __name__ == "__main__":
    main()
