"""The language models of a team: loading, prompts, sampling, scoring, reward heads."""
