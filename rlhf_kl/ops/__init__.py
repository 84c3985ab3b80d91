"""Pure math on tensors: no state, no configuration, no input or output."""
