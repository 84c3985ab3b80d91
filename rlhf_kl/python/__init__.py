"""The program from Python and notebooks: `train`, as the command does it, and `PPO`, whose loop is the caller's."""
