"""What can be looked at: each view is a question to an explorer, answered with plain values, and a template."""
