"""Self-contained HTML pages: one file, nothing fetched, every text from outside escaped."""
