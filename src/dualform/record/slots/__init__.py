"""What slots are made of: the calls of the model, the columns of a batch, and copied inputs and errors."""
