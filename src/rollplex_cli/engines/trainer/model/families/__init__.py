"""What a family computes, one module each; `gather.py` picks by `model_type`."""
