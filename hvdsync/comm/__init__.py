"""Who am I, and how ranks talk: launch detection, one small communicator interface, verbs upon it."""
