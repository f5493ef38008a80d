"""specdec beside vLLM and transformers: same weights, prompts and token counts, alternately in one run."""
