"""Each operation on KV in plain torch: the oracle of the native kernels, and the fallback without them."""
