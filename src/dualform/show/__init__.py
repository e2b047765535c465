"""Answers to a person: the command line, figures (``dualform.plot``), a report, the demo."""
