"""From a config to what runs: the device and processes, models, data and scorers, the checked start, the trainer."""
