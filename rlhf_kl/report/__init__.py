"""Finished and running runs as figures: read from their folders, judged, put side by side."""
