"""Self-contained HTML pages: one file, nothing fetched, all text of runs is escaped."""
