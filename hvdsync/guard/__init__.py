"""What may go wrong while replicas train, and how it is noticed on every rank."""
