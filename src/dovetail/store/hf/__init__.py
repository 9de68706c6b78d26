"""Reads Hugging Face folders, and the LoRA adapters of PEFT. Never unpickles anything."""
