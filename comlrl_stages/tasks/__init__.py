"""Tasks: items, one formatter per agent, a reward; and the runner that scores joint responses."""
