"""What a push costs beyond one machine: a model, its constants, and the published results that it is held against."""
