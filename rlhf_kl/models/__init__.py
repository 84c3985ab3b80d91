"""Loading models and tokenizers, and running them over padded batches."""
