"""Texts, prompts and preference pairs from files."""
