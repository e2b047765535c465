"""The format on disk: the manifest, tables, tensors, and how rows and weights are encoded in them."""
