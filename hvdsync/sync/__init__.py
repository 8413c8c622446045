"""How replicas agree: bucket plan, compression, reducers, learning-rate schedule."""
