"""Teams at work on tasks: from items to sampled joint responses."""
