"""The commands: what each is asked for, does and shows."""
