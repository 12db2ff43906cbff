"""Sources of weights: policy + reader + arena. Never does math on weights."""
