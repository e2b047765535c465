"""What is kept beside slots: first and frozen weights, snapshots, states of the optimiser; new and resumed memories."""
