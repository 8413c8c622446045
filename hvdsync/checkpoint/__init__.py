"""What must survive: a store of whole, verified folders, and the collective verb upon it."""
