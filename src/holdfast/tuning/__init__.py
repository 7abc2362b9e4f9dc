"""Searches for settings, recommendations and the leaderboard: many short runs, judged on validation samples."""
