"""Supervised training: of a language model on texts or responses, of a reward model on pairs or labels."""
