"""Qwen2.5-VL as plain functions over the parameters of the Hugging Face module."""
