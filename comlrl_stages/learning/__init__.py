"""The mathematics: pure functions without files, tasks or models of their own."""
