"""The memory plan as tables and a picture, and against what a run measured."""
