"""What a person asks for (inspect, generate, chat), as functions that return data. The CLI renders it."""
