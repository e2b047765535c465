"""Is the memory true? Marks, probes of gradients, checksums of weights, and the certificate as it grows."""
