"""What will be recorded, decided before the first step: layers, parameters, options."""
