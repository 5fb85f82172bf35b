"""The plugin host: other people's code that the settings name, and the threads it works in. Floor 4, beside control."""
