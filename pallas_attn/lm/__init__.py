"""The demo: a Llama-family decoder, its checkpoints, the batch decode loop."""
