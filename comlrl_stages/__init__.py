"""Cooperative training of teams of LLM agents, as a pipeline of resumable stages."""

__version__ = "0.1.0"
