"""Vision-language models as plain functions over the parameters of the Hugging Face module."""
