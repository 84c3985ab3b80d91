"""What a run leaves behind and what a person sees: run folder, metrics, TensorBoard, alerts, display."""
