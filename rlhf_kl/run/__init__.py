"""What a run leaves and shows while it runs: folder, rows, checkpoints, resume, TensorBoard and alerts."""
