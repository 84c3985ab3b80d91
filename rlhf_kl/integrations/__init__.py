"""Connections to other trainers; each imports its own library, when it is used."""
