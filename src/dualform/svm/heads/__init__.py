"""What the heads of a real attention layer select, and what separates that."""
