"""Recordings of training frameworks with each engine, judged by means that share no code with modtrace."""
