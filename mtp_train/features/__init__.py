"""The feature store: hidden states of the target, dumped once and read by the trainer."""
