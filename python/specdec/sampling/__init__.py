"""Settings of the sampling distribution: parameters, logits processors, and the table of biases and penalties."""
