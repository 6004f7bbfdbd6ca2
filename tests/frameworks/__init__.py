"""What people train with, recorded: frameworks × engines, each judged by means that share no code with ours."""
