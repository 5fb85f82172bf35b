"""The plugin host: runs other people's code, which the settings name, in threads. Floor 4, beside control."""
