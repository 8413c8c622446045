"""Who am I, and how ranks talk: launch detection, a communicator interface, verbs upon it."""
