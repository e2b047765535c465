"""The command line. ``cli`` has the commands and their options, the other modules what they do."""
