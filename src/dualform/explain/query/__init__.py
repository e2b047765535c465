"""From inputs to a question: a forward pass, a target, and what each layer is asked."""
